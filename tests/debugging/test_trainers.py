"""Engines without a trainer serve what they loaded, from their first start to the last."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
import torch

from asyncrl.components import _config_of_engines, create_rollout_components, create_train_group
from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.saved_batch import save_batch
from asyncrl.debugging.replay import NoEngines, Replay, SavedRollouts
from asyncrl.debugging.trainers import NoTrainer, ReplayingTrainGroup
from asyncrl.exit_protocol import StopRequest
from asyncrl.inference.controller import InferenceController
from asyncrl.observability.events import EventLog
from asyncrl.rollout.executor import RolloutExecutor
from asyncrl.run.parts import InferencePart, RolloutPart, TrainingPart
from asyncrl.training.train_group import TrainGroup
from tests.contracts.fake_executor import FakeExecutor
from tests.inference.conftest import StartFleet, eventually, start_fleet
from tests.run.jobs import a_job
from tests.training.worlds import make_batch

pytestmark = pytest.mark.anyio
__all__ = ["start_fleet"]  # a fixture
CONFIG = _config_of_engines(Config.model_validate({"debug": {"rollout_only": True}}))


async def test_nothing_is_sent_to_engines_so_nothing_is_overwritten_to_see_whether_it_arrives(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(
        2, tensors={"weight": torch.ones(4)}, weights=CONFIG.weights.model_dump(exclude_none=True)
    ) as fleet:
        loaded = fleet.engines[0].weights.rank_checksums()
        await fleet.controller.wait_ready()
        await NoTrainer(fleet.controller, tmp_path, 0).update_weights()
        assert fleet.states() == ["serving", "serving"]
        assert [engine.weights.rank_checksums() for engine in fleet.engines] == [loaded, loaded]


async def test_engines_that_are_started_anew_and_have_nothing_to_load_are_let_serve_again(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(1, restarts=3, weights=CONFIG.weights.model_dump(exclude_none=True)) as fleet:
        await fleet.controller.wait_ready()
        trainer = NoTrainer(fleet.controller, tmp_path / "removed", 0)
        for _step in range(3):
            await trainer.update_weights()
        assert fleet.kinds().count("weight_update_committed") == 1
        await fleet.host.kill("engine-0")
        with anyio.fail_after(5):
            await fleet.controller.wait_publication_needed()
        await trainer.update_weights()
        await eventually(lambda: fleet.states() == ["serving"])


@pytest.mark.parametrize(
    ("stand_in", "part"),
    [
        *((NoTrainer, TrainingPart), (ReplayingTrainGroup, TrainingPart), (TrainGroup, TrainingPart)),
        *((SavedRollouts, RolloutPart), (RolloutExecutor, RolloutPart)),
        *((NoEngines, InferencePart), (InferenceController, InferencePart)),
    ],
    ids=lambda kind: kind.__name__,
)
def test_a_stand_in_has_all_that_a_loop_may_ask_of_it_as_the_real_part_has(stand_in: type, part: type) -> None:
    """The type checker sees to it too, with the arguments; it is not run everywhere."""
    asked = {name for kind in part.__mro__ if getattr(kind, "_is_protocol", False) for name in vars(kind)}
    asked = {name for name in asked if not name.startswith("_")} - {"resumed"}  # set in the constructor
    assert len(asked) > 10 and {name for name in asked if not hasattr(stand_in, name)} == set()


async def test_half_a_job_is_built_of_stand_ins(tmp_path: Path) -> None:
    save_batch(make_batch(3), tmp_path, {})
    async with anyio.create_task_group() as tasks:
        debug = {"train_only": True, "load_rollouts": str(tmp_path)}
        job = a_job(tasks, debug=debug, train={"num_steps": None})
        job.directory.control = tmp_path / "control"
        built = await create_rollout_components(job)
        tasks.cancel_scope.cancel()
    assert (type(built.inference_controller), type(built.rollout_executor)) == (NoEngines, SavedRollouts)
    assert built.num_rollout_per_epoch == 4
    assert type(await create_train_group(a_job(debug={"rollout_only": True}), built)) is NoTrainer


async def test_a_loop_that_trains_with_cross_entropy_is_compared_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As entrypoints/own_loop.py does."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "train/tokens": 9, "train/loss": 0.5}\n')
    batch, notes, events = make_batch(3), list[str](), EventLog(None)

    async def train_sft(self: TrainGroup, rollout_id: int | None, batch: object, lr: float) -> dict[str, float]:
        return {"train/tokens": 9.0, "train/loss": 0.75}

    async def logprobs(self: TrainGroup, batch: RolloutBatch) -> torch.Tensor:
        return batch.logprobs

    monkeypatch.setattr(TrainGroup, "train_sft", train_sft)
    monkeypatch.setattr(TrainGroup, "logprobs", logprobs)
    trainer = ReplayingTrainGroup.__new__(ReplayingTrainGroup)
    trainer._replay = Replay(
        tmp_path / "rollouts", tolerance=1e-4, report=tmp_path / "comparison.jsonl", events=events, note=notes.append
    )
    await trainer.train_sft(None, batch, 1e-3)
    assert notes == [], "a step of the warm-up"
    await trainer.train_sft(3, batch, 1e-3)
    assert notes[0].startswith("step 4: train/loss was 0.5, is 0.75")
    assert [event["component"] for event in events.recent] == ["replay"]


async def test_stand_ins_serve_several_trainers_as_the_real_parts_do(tmp_path: Path) -> None:
    save_batch(make_batch(3), tmp_path, {})
    saved, trainer = SavedRollouts(tmp_path, StopRequest()), NoTrainer(NoEngines(), tmp_path, "0.0")
    fake = FakeExecutor(trainers=("actor", "critic"))
    for name in ("actor", "critic"):
        assert (await saved.get(3, name)).rollout_id == (await fake.get(3, name)).rollout_id == 3
        await trainer.offload(role=name)
        await trainer.onload(role=name)
        await saved.commit(3, name)
        await fake.commit(3, name)
    assert fake.counts()["trained"] == 2
