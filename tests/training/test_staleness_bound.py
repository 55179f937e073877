"""The last line of defence: a batch that is too old is never trained, whoever made it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from asyncrl.data.sample import VersionSpan
from asyncrl.errors import StalenessError
from asyncrl.observability.events import EventLog
from asyncrl.training.train_group import TrainGroup
from tests.training.worlds import make_batch, run_world


def test_a_batch_beyond_the_bound_reaches_no_rank_and_the_trainer_goes_on() -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        made_by_0 = dataclasses.replace(make_batch(), rollout_id=3)
        with pytest.raises(StalenessError, match=r"group g0, sample s0: tokens 2-5 were made by weights '0\.0'"):
            await group.train(3, made_by_0)
        spans = ((VersionSpan("0.2", 2, 5),), (VersionSpan("0.1", 2, 3), VersionSpan("0.3", 3, 4)))
        await group.train(3, dataclasses.replace(made_by_0, versions=spans))
        return [event["rollout_id"] for event in events.recent if event["kind"] == "trainer_stepped"]

    world = run_world(scenario, world_size=1, config={"rollout": {"max_staleness": 2}})

    assert world.value == [3] and world.exit_codes == (0,)
