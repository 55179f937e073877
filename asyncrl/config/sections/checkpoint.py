"""When the state of training is saved, which checkpoints are kept, and where a job goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from asyncrl.config.sections.base import Section


class CheckpointConfig(Section):
    """Checkpoints, from which a job can go on after any end."""

    every: int = Field(default=0, ge=0)
    """Save after every n-th step; 0 never saves."""

    keep_last: int = Field(default=2, ge=1)
    """The newest checkpoints that are kept; older ones are removed once a new one is complete."""

    keep_every: int = Field(default=0, ge=0)
    """Checkpoints of every n-th step are never removed; 0: of no step."""

    resume: Literal["auto", "never"] | Path = "auto"
    """Where training begins. auto: at the newest intact checkpoint of the run directory, or at the model if there is
    none. never: at the model. A path: at that checkpoint, for a run that has no checkpoint of its own yet. A gang that
    torchrun starts again (--max-restarts) always goes on from its own newest checkpoint."""

    timeout_s: float = Field(default=1800.0, gt=0)
    """A checkpoint that is written for longer than this, beside the training, causes a warning that names the slow
    ranks."""

    def due(self, step: int) -> bool:
        """Whether to save after `step` trained steps."""
        return self.every > 0 and step % self.every == 0
