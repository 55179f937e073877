"""Whose turn it is on GPUs that engines share with the trainer, over parts that only note what is asked of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import EngineError, EnginesLostError, TrainerError, WeightUpdateError
from asyncrl.run.pauses import Pauses
from asyncrl.run.turns import Halves, Turns, make_turns
from tests.run.jobs import Engines, Executor, Trainer

pytestmark = pytest.mark.anyio

ENGINES_LEAVE = ["executor.engines_paused", "engines.offload", "trainer.onload"]
WEIGHTS_GO = ["trainer.offload keep_weights", "engines.onload_weights", "trainer.update_weights 3"]
ENGINES_COME_BACK = ["trainer.offload", "engines.onload_kv"]


class Shared:
    """Engines, executor and trainer on the same GPUs, or each on their own."""

    def __init__(self, *, colocated: bool = True, peak: str = "gpu", **engines: Any) -> None:
        self.calls: list[str] = []
        self.notes: list[str] = []
        self.pauses = Pauses()
        self.pauses.add(Executor(self.calls))
        config = Config.model_validate({"engine": {"colocate_memory_peak_device": peak}})
        layout: Any = SimpleNamespace(colocated=colocated)
        self.turns: Turns = make_turns(layout, config, self.pauses, self.notes.append)
        self.engines: Any = Engines(self.calls, **engines)
        self.report = SimpleNamespace(version="0.4")
        self.trainer: Any = Trainer(self.calls, update_weights=self.report)

    async def trainers_turn(self) -> None:
        await self.turns.trainers_turn(Halves(self.engines, self.trainer))

    async def publish(self) -> Any:
        return await self.turns.publish(Halves(self.engines, self.trainer), 3)


async def test_the_trainers_turn_on_shared_gpus_is_a_pause_of_the_engines() -> None:
    apart = Shared(colocated=False)
    await apart.trainers_turn()
    assert apart.calls == [] and not apart.turns.engines_wait
    shared = Shared()
    await shared.trainers_turn()
    assert shared.calls == ENGINES_LEAVE and shared.turns.engines_wait


async def test_weights_are_published_while_the_trainer_holds_them() -> None:
    apart = Shared(colocated=False)
    assert await apart.publish() is apart.report
    assert apart.calls == ["trainer.update_weights 3"]

    shared = Shared()
    await shared.trainers_turn()
    assert await shared.publish() is shared.report
    assert shared.calls == [*ENGINES_LEAVE, *WEIGHTS_GO, *ENGINES_COME_BACK, "executor.engines_resumed"]
    assert not shared.turns.engines_wait


async def test_an_executor_hears_of_new_weights_once_engines_have_all_of_their_memory_back() -> None:
    shared = Shared()
    await shared.trainers_turn()

    async def publish(rollout_id: int) -> None:
        async with shared.pauses.update(requests_end=False):
            shared.pauses.serve("0.4")

    shared.trainer.update_weights = publish
    shared.calls.clear()
    await shared.publish()
    told = ["executor.set_weight_version 0.4", "executor.engines_resumed"]
    assert shared.calls == [*WEIGHTS_GO[:2], *ENGINES_COME_BACK, *told]


async def test_a_publication_in_the_engines_turn_has_them_make_room_first() -> None:
    shared = Shared()
    await shared.publish()
    room = ["executor.engines_paused", "engines.wait_ready", "engines.offload_kv", "trainer.onload"]
    assert shared.calls == [*room, *WEIGHTS_GO, *ENGINES_COME_BACK, "executor.engines_resumed"]


async def test_a_pause_of_engines_on_shared_gpus_ends_also_where_they_do_not_come_back() -> None:
    shared = Shared(onload_kv=EngineError("engine-0: gone"))
    await shared.trainers_turn()
    with pytest.raises(EngineError):
        await shared.publish()
    assert shared.calls[-1] == "executor.engines_resumed" and shared.pauses.reasons == ()


async def test_engines_go_on_after_a_publication_that_failed_but_not_on_memory_of_a_trainer_that_is_lost() -> None:
    for error, comes_back in ((WeightUpdateError("refused"), ENGINES_COME_BACK), (TrainerError("rank 1 died"), [])):
        shared = Shared()
        await shared.trainers_turn()
        shared.trainer._answers["update_weights"] = error
        shared.calls.clear()
        with pytest.raises(type(error)):
            await shared.publish()
        assert shared.calls == [*WEIGHTS_GO, *comes_back, "executor.engines_resumed"]


async def test_engines_that_all_ended_in_the_trainers_turn_are_started_again_once() -> None:
    shared = Shared()
    await shared.trainers_turn()
    lost = EnginesLostError("nobody is left")
    shared.trainer._answers["update_weights"] = lost
    shared.calls.clear()
    with pytest.raises(EnginesLostError):
        await shared.publish()
    again = ["trainer.offload", "engines.onload", "engines.wait_updatable"]
    again += ["engines.wait_ready", "engines.offload_kv", "trainer.onload"]
    assert shared.calls == [*WEIGHTS_GO, *again, *WEIGHTS_GO, "executor.engines_resumed"]
    assert len(shared.notes) == 1 and "nobody is left" in shared.notes[0]


async def test_a_turn_that_was_cancelled_halfway_may_be_taken_again() -> None:
    shared = Shared()
    shared.engines._answers["offload"] = EngineError("no room")
    with pytest.raises(EngineError):
        await shared.trainers_turn()
    shared.engines._answers["offload"] = None
    await shared.trainers_turn()
    await shared.publish()
    assert shared.calls.count("executor.engines_paused") == shared.calls.count("executor.engines_resumed") == 1


@pytest.mark.parametrize(
    ("colocated", "peak", "asked"),
    [
        (True, "gpu", ["engines.wait_ready", "engines.offload_kv"]),
        (True, "cpu", ["engines.wait_ready", "engines.offload"]),
        (False, "gpu", []),
    ],
)
async def test_colocated_engines_make_room_before_the_trainer_is_built(
    colocated: bool, peak: str, asked: list[str]
) -> None:
    shared = Shared(colocated=colocated, peak=peak)
    await shared.turns.make_room(shared.engines)
    assert shared.calls == asked
    if colocated:
        shared.calls.clear()
        await shared.publish()
        assert shared.calls[:2] == ["executor.engines_paused", "trainer.offload keep_weights"], "it is there already"
