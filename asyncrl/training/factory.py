"""Which trainer a rank runs. Cheap to import: the trainer's own libraries are loaded in the thread that will train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.training.ranks.layout import RankLayout

if TYPE_CHECKING:
    from asyncrl.training.ranks.commands import Trainer


def make_trainer(config: Config, layout: RankLayout) -> Trainer:
    """The trainer of one rank; called on every rank, in the thread that will train."""
    from asyncrl.training.megatron.trainer import MegatronTrainer

    return MegatronTrainer(config, layout)
