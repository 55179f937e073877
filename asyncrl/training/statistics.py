"""The statistics of the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.training.checkpoints.saver import Written
from asyncrl.training.ranks.trainer_thread import TrainerThreadStatistics


@dataclass(frozen=True, slots=True)
class TrainGroupStatistics:
    """The trainer at one moment."""

    thread: TrainerThreadStatistics
    step: int
    """Batches trained so far."""
    failure: str | None
    """The error that every further command raises; None while the trainer works."""
    checkpoint: Written | None
    """The newest checkpoint that this process has completed."""
    saving: int | None
    """Step of the checkpoint that is being written; None where there is none."""
