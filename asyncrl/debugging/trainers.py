"""Trainers of half a job: one that trains on saved batches, and none at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.data.batch import RolloutBatch
from asyncrl.data.fleet import UpdateAck
from asyncrl.debugging.replay import Replay
from asyncrl.inference.controller import InferenceController
from asyncrl.training.ranks.trainer_thread import TrainerThreadStatistics
from asyncrl.training.statistics import TrainGroupStatistics
from asyncrl.training.train_group import TrainGroup


class ReplayingTrainGroup(TrainGroup):
    """`debug.train_only`: compares each step with the recorded one, and publishes to nobody."""

    def __init__(self, *args: Any, replay: Replay, **how: Any) -> None:
        super().__init__(*args, **how)
        self._replay = replay

    async def train(self, rollout_id: int, batch: RolloutBatch) -> dict[str, float]:
        train = super().train
        return await self._replay.step(batch, lambda: self.logprobs(batch), lambda: train(rollout_id, batch))

    async def update_weights(self, rollout_id: int | None = None) -> None: ...

    async def dispose(self) -> None:
        await super().dispose()
        self._replay.conclude()


class NoTrainer:
    """`debug.rollout_only`: stands in for the TrainGroup. Engines serve what they loaded when they started."""

    resumed = None

    def __init__(self, controller: InferenceController, model: Path, version: str) -> None:
        """`version` is that of the weights in `model`."""
        self._controller = controller
        self._model = model
        self._version = version
        self._lets_serve = True

    async def init(self) -> int:
        return 0

    async def update_weights(self, rollout_id: int | None = None) -> None:
        """Lets the engines serve: once, and again where all of them were started anew and wait for weights.

        Weights without a trainer never change, so no batch is ever too old.
        """
        if self._lets_serve or self._controller.fleet().needs_publication:
            lease = await self._controller.begin_weight_update(self._version)
            acks = [UpdateAck(engine.engine_id, engine.generation) for engine in lease.engines]
            await self._controller.commit_weight_update(lease.lease_id, acks, self._model)
            self._lets_serve = False

    async def train(self, rollout_id: int, batch: RolloutBatch) -> dict[str, float]:
        return {}

    async def train_sft(self, rollout_id: int | None, batch: RolloutBatch, lr: float) -> dict[str, float]:
        return {}

    async def settle(self) -> int:
        return 0

    async def save_checkpoint(
        self, rollout_id: int, extra: Mapping[str, bytes] | None = None, *, wait: bool = False
    ) -> None: ...

    def statistics(self) -> TrainGroupStatistics:
        return TrainGroupStatistics(TrainerThreadStatistics(None, None, 0), 0, None, None, None)
