"""Trainers of half a job: one that trains on saved batches, and none at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.data.batch import RolloutBatch
from asyncrl.data.fleet import UpdateAck
from asyncrl.debugging.replay import Replay
from asyncrl.training.checkpoints.store import SavedCheckpoint
from asyncrl.training.ranks.trainer_thread import TrainerThreadStatistics
from asyncrl.training.roles import ACTOR
from asyncrl.training.statistics import TrainGroupStatistics
from asyncrl.training.train_group import TrainGroup

if TYPE_CHECKING:
    from asyncrl.run.parts import ServingFleet


class ReplayingTrainGroup(TrainGroup):
    """`debug.train_only`: compares each step with the recorded one, and publishes to nobody."""

    def __init__(self, *args: Any, replay: Replay, **how: Any) -> None:
        """As a TrainGroup; `replay` compares."""
        super().__init__(*args, **how)
        self._replay = replay

    async def train(self, rollout_id: int, batch: RolloutBatch) -> dict[str, float]:
        """As a TrainGroup does, with the trainer's log-probs compared before the step and the metrics after it."""
        train = super().train
        return await self._replay.step(batch, lambda: self.logprobs(batch), lambda: train(rollout_id, batch))

    async def train_sft(self, rollout_id: int | None, batch: RolloutBatch, lr: float) -> dict[str, float]:
        """Likewise, for a loop that trains its steps with cross entropy; a step of the warm-up was never recorded."""
        train_sft = super().train_sft
        if rollout_id is None:
            return await train_sft(rollout_id, batch, lr)
        return await self._replay.step(batch, lambda: self.logprobs(batch), lambda: train_sft(rollout_id, batch, lr))

    async def update_weights(self, rollout_id: int | None = None) -> None:
        """There are no engines."""

    async def dispose(self) -> None:
        """As a TrainGroup; then the replay says how it went."""
        await super().dispose()
        self._replay.conclude()


class NoTrainer:
    """`debug.rollout_only`: stands in for the TrainGroup (`asyncrl.run.parts.TrainingPart`).

    Engines serve what they loaded when they started.
    """

    resumed: SavedCheckpoint | None = None

    def __init__(self, engines: ServingFleet, model: Path, version: str) -> None:
        """`model` is the directory that the engines loaded, `version` the version of its weights."""
        self._engines = engines
        self._model = model
        self._version = version
        self._lets_serve = True

    async def init(self, *, threads: int | None = None) -> int:
        """The first step."""
        return 0

    async def update_weights(self, rollout_id: int | None = None) -> None:
        """Lets the engines serve: once, and again where all of them were started anew and wait for weights.

        Weights without a trainer never change, so no batch is ever too old.
        """
        if self._lets_serve or self._engines.fleet().needs_publication:
            lease = await self._engines.begin_weight_update(self._version)
            acks = [UpdateAck(engine.engine_id, engine.generation) for engine in lease.engines]
            await self._engines.commit_weight_update(lease.lease_id, acks, self._model)
            self._lets_serve = False

    async def train(self, rollout_id: int, batch: RolloutBatch) -> dict[str, float]:
        """Trains nothing; there are no metrics."""
        return {}

    async def train_sft(self, rollout_id: int | None, batch: RolloutBatch, lr: float) -> dict[str, float]:
        """Likewise."""
        return {}

    async def reset_optimizer(self) -> None:
        """There is none."""

    async def settle(self) -> int:
        """No step is ever in progress, and none is trained."""
        return 0

    async def save_checkpoint(
        self, rollout_id: int, extra: Mapping[str, bytes] | None = None, *, wait: bool = False
    ) -> None:
        """There is nothing to go on from."""

    async def finish_checkpoint(self) -> None:
        """None is ever written."""

    async def export_hf(self, directory: Path) -> None:
        """The policy is the model on disk."""

    async def offload(self, *, keep_weights: bool = False, role: str = ACTOR) -> None:
        """It has no memory."""

    async def onload(self, role: str = ACTOR) -> None:
        """It has no memory."""

    def statistics(self) -> TrainGroupStatistics:
        """Of a trainer that has done nothing."""
        return TrainGroupStatistics(TrainerThreadStatistics(None, None, 0), 0, None, None, None)
