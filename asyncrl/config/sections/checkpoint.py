"""When the state of training is saved, how much of it is kept, and where a job goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from asyncrl.config.sections.base import Section


class CheckpointConfig(Section):
    """Everything that a job needs to go on after its end, however it ended."""

    every: int = Field(default=0, ge=0)
    """Save after every n-th step; 0 never saves."""

    keep_last: int = Field(default=2, ge=1)
    """The newest checkpoints that are kept; older ones are removed once a new one is complete."""

    keep_every: int = Field(default=0, ge=0)
    """Checkpoints of every n-th step are kept for good, whatever their age; 0 keeps none so."""

    resume: Literal["auto", "never"] | Path = "auto"
    """Where training begins: auto is the newest intact checkpoint of the run directory, where there is one; never is
    the model; a path is one checkpoint directory, for a run that has none of its own yet. A gang that torchrun starts
    again (--max-restarts) goes on from what it wrote itself, whatever stands here."""

    timeout_s: float = Field(default=1800.0, gt=0)
    """Writing beside the training for longer than this is a warning that says who is slow."""

    def due(self, step: int) -> bool:
        """Whether to save after `step` trained steps."""
        return self.every > 0 and step % self.every == 0
