"""Running a part of a job alone, on what another job has left."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from asyncrl.config.sections.base import Section


class DebugConfig(Section):
    """Half a job: to find out which half is at fault."""

    save_rollouts: bool = False
    """Keep every batch as it goes to the trainer, in rollouts/ of the run directory: a .safetensors and a .json."""

    train_only: bool = False
    """No engines and no rewards: train on the batches in debug.load_rollouts, from where training begins to the last of
    them, and compare losses, gradient norms and log-probs with what was recorded then."""

    rollout_only: bool = False
    """No trainer: engines serve the model as it is on disk, and batches are gathered one after the other. With
    debug.save_rollouts they can be trained later."""

    load_rollouts: Path | None = None
    """Directory of saved batches for debug.train_only: rollouts/ of a run, or the failures/ that a NaN left behind."""

    tolerance: float = Field(default=1e-4, ge=0)
    """Largest relative difference to what was recorded that passes for none. On the same layout, in float32, there is
    none at all."""
