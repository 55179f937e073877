"""A learner on the Megatron backend, as a rank holds it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.training.backends import make_backend
from asyncrl.training.learner.learner import Learner
from asyncrl.training.megatron.backend import MegatronBackend
from asyncrl.training.megatron.optimizer import Optimizer
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.training.roles import ACTOR, Role


class WholeLearner(Learner):
    """A rank's learner that also computes the columns of the batch, as TrainGroup does for all ranks."""

    def train(self, batch: RolloutBatch) -> dict[str, float]:
        columns = self._algorithm.columns(batch)
        metrics = super().train(replace(batch, columns={**batch.columns, **columns.tokens}))
        return metrics | {f"train/{name}": value for name, value in columns.metrics.items()}


def learner_of(layout: RankLayout, **sections: dict[str, Any]) -> Learner:
    """An actor, built and loaded; `sections` are those of the configuration. Collective."""
    train = {"tensor_parallel": layout.tensor_parallel, **sections.pop("train", {})}
    config = Config.model_validate({**sections, "train": train})
    learner = WholeLearner(config, layout, make_backend(config, layout, Role(ACTOR, str(config.model.path))))
    learner.backend.init()
    return learner


def optimizer_of(learner: Learner) -> Optimizer:
    """Megatron's own optimizer, for tests of its buffers."""
    assert isinstance(learner.backend, MegatronBackend)
    return learner.backend._optimizer


def weights_of(learner: Learner) -> dict[str, Tensor]:
    """A copy of the whole model, by Hugging Face name. Collective."""
    return {name: tensor.clone() for name, tensor in learner.backend.export_tensors()}
