"""Events of the weight plane."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from asyncrl.observability.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished(Event):
    """All `engines` serve `version`."""

    kind: ClassVar[str] = "weights_published"

    version: str
    seconds: float
    pause_s: float
    transfer_s: float
    bytes: int
    attempts: int
    engines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransferFailed(Event):
    """A transfer within a publication lost engines; the publication goes on with the others, or ends."""

    kind: ClassVar[str] = "weight_transfer_failed"

    version: str
    transfer: int
    """Counts from 1 within the publication."""
    engines: dict[str, str] = field(default_factory=dict)
    """Engine id → reason."""
    reason: str | None = None
    """Why the trainer's side broke; None where it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateFailed(Event):
    """A publication ended without a commit; its engines were handed back to the controller."""

    kind: ClassVar[str] = "weight_update_failed"

    version: str
    seconds: float
    reason: str
