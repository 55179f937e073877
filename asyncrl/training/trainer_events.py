"""Events of the trainer's ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.observability.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReady(Event):
    """Every rank has built its model."""

    kind: ClassVar[str] = "trainer_ready"

    ranks: int
    tensors: int
    """Tensors of the export."""
    bytes: int
    """Size of the export."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerResumed(Event):
    """Every rank has taken its state from a checkpoint."""

    kind: ClassVar[str] = "trainer_resumed"

    step: int
    """Batches trained when it was written."""
    path: str
    other_layout: str = ""
    """The layouts that wrote and read it, in words, where they differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStepped(Event):
    """One rollout batch was trained."""

    kind: ClassVar[str] = "trainer_stepped"

    rollout_id: int
    step: int
    """Batches trained so far; the step of the weights that now exist."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSwitchedOn(Event):
    """Tokens of another policy are corrected for from the next step on (algorithm.correction = "auto")."""

    kind: ClassVar[str] = "correction_switched_on"

    step: int
    """Batches trained so far."""
    mismatch: float
    """train/mismatch_k3 of the last one, in nat."""
    threshold: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRankFailed(Event):
    """A rank raised, died, or hangs; the trainer takes no further command."""

    kind: ClassVar[str] = "trainer_rank_failed"

    rank: int
    command: str
    reason: str
