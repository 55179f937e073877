"""What the controller counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InferenceStatistics:
    """A snapshot of the controller."""

    engines: Mapping[str, int]
    """State → engines in it, of the trained model."""
    beside: Mapping[str, Mapping[str, int]]
    """The same of other models, by name."""
    published_version: str | None
    open_lease: str | None
    updates_committed: int
    updates_aborted: int
    restarts: int
    """Of engines and router."""
    paused_s: float
    """Seconds without generation over all committed updates."""
    start_s: float | None
    """From `start` to the last engine's first generation; None before."""
