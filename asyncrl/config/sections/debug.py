"""Running half a job alone, on the files of another job."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from asyncrl.config.sections.base import Section


class DebugConfig(Section):
    """Half a job, to find out which half is at fault."""

    save_rollouts: bool = False
    """Keep every batch as the trainer gets it, in rollouts/ of the run directory: a .safetensors file, and a .json file
    that also holds prompts, answers and responses as text."""

    train_only: bool = False
    """No engines and no rewards: train on the batches in debug.load_rollouts, from the step where training begins to
    the last batch, and compare losses, gradient norms and log-probs with the recorded ones."""

    rollout_only: bool = False
    """No trainer: engines serve the model as it is on disk, and batches are gathered one after the other. With
    debug.save_rollouts they can be trained later."""

    load_rollouts: Path | None = None
    """Directory of saved batches for debug.train_only: rollouts/ of a run, or the failures/ that a NaN left behind."""

    tolerance: float = Field(default=1e-4, ge=0)
    """Largest relative difference from a recorded value that counts as none. On the same layout, in float32, there is
    no difference at all."""
