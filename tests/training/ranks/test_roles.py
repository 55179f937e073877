"""A second role over scripted ranks: commands reach it by name, its failures name it, checkpoints hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import CheckpointError, NonFiniteError, TrainerError
from asyncrl.observability.events import EventLog
from asyncrl.training.roles import Role
from asyncrl.training.train_group import TrainGroup
from tests.training.worlds import hang, make_batch, raise_value_error, run_world

REFERENCE = (Role("reference", "/models/old", trained=False),)


def not_finite() -> None:
    raise NonFiniteError("a log-prob is nan")


@pytest.mark.parametrize(
    ("fault", "method", "message"),
    [
        (raise_value_error, "init", "while building the trainer (role reference): trainer rank 1: ValueError: boom"),
        (raise_value_error, "logprobs", "while computing log-probs (role reference): trainer rank 1: ValueError: boom"),
        (raise_value_error, "snapshot", "trainer rank 1: ValueError: boom in the role reference"),
        (not_finite, "logprobs", "trainer rank 1: reference: a log-prob is nan"),
        (hang, "logprobs", "trainer: computing log-probs (role reference) did not end within 2 s"),
    ],
)
def test_a_failure_in_a_role_names_the_role(fault: Any, method: str, message: str, tmp_path: Path) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        with pytest.raises(TrainerError) as caught:
            await group.init()
            await group.logprobs(make_batch())  # the actor's, in which nothing fails
            if method == "snapshot":
                await group.save_checkpoint(0)
            await group.logprobs(make_batch(), role="reference")
        return str(caught.value)

    config = {"run": {"dir": str(tmp_path)}, "train": {"step_timeout_s": 2.0}}
    world = run_world(scenario, faults={(1, f"reference.{method}"): fault}, config=config, roles=REFERENCE)
    assert message in world.value


def test_a_failure_of_the_actor_names_no_role_beside_another() -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        with pytest.raises(TrainerError) as caught:
            await group.train(0, make_batch())
        return str(caught.value)

    world = run_world(scenario, faults={(1, "forward_backward"): raise_value_error}, roles=REFERENCE)
    assert world.value.startswith("while training on rollout 0: trainer rank 1: ValueError: boom\n")


def test_a_role_that_is_not_there_is_refused_and_the_trainer_goes_on() -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        with pytest.raises(TrainerError, match="this trainer has no role 'critic'; it has actor, reference"):
            await group.logprobs(make_batch(), role="critic")
        await group.offload(role="reference")
        await group.onload(role="reference")
        return (await group.train(0, make_batch()))["train/updates"]

    assert run_world(scenario, world_size=1, roles=REFERENCE).value == 1.0


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_holds_every_role_and_goes_to_a_job_with_the_same_roles_alone(
    world_size: int, tmp_path: Path
) -> None:
    async def save(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        return str(await group.save_checkpoint(0, wait=True))

    async def resume(group: TrainGroup, events: EventLog) -> Any:
        return await group.init()  # each role asserts that it gets the shard of its own

    async def refused(group: TrainGroup, events: EventLog) -> Any:
        with pytest.raises(CheckpointError) as caught:
            await group.init()
        return str(caught.value)

    world: dict[str, Any] = {"world_size": world_size, "config": {"run": {"dir": str(tmp_path)}}}
    path = Path(run_world(save, roles=REFERENCE, **world).value)
    assert sorted(file.parent.name for file in path.glob("trainer/*/*.json")) == sorted(
        ["actor", "reference"] * world_size
    )
    assert run_world(resume, roles=REFERENCE, **world).value == 1
    message = run_world(refused, **world).value
    assert "holds the roles actor, reference, and this job has actor" in message
