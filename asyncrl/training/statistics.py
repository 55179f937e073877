"""What the trainer tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.training.checkpoints.saver import Written
from asyncrl.training.ranks.trainer_thread import TrainerThreadStatistics


@dataclass(frozen=True, slots=True)
class TrainGroupStatistics:
    """A snapshot."""

    thread: TrainerThreadStatistics
    step: int
    """Batches trained so far."""
    failure: str | None
    """Why the trainer takes no further command."""
    checkpoint: Written | None
    """The newest that this process completed."""
    saving: int | None
    """Step of the checkpoint that is being written."""
