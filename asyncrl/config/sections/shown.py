"""What a run shows of itself: samples as text, and its figures in experiment trackers."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from asyncrl.config.sections.base import Section


class SamplesConfig(Section):
    """Samples kept as text in samples.jsonl of the run directory; `asyncrl samples RUN` shows them."""

    per_step: int = Field(default=16, ge=0)
    """Samples to keep of each training batch, spread evenly over its groups; 0 keeps none."""

    per_evaluation: int | None = Field(default=None, ge=0)
    """Samples to keep of each evaluation; none keeps all of them, 0 keeps none."""

    max_megabytes: float = Field(default=128.0, gt=0)
    """Largest samples.jsonl. A file that has reached this size becomes samples.1.jsonl, in place of the one before."""


class TrackConfig(Section):
    """Experiment trackers that get every line of metrics.jsonl. Each runs in a process of its own: one that hangs or
    fails costs the run nothing. Their packages: pip install 'asyncrl[trackers]'."""

    to: tuple[str, ...] = ()
    """Where to: `tensorboard`, `wandb`, `trackio`, or a dotted path `package.module:Class` of your own
    (`asyncrl.observability.trackers.sink.Sink`). Several at once."""

    project: str = "asyncrl"
    """Project of the tracker that the run belongs to."""

    name: str | None = None
    """Name of the run; none: the name of its directory."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for single trackers, by name: {wandb = {mode = "offline", entity = "us"}} for wandb.init,
    {trackio = {space_id = "us/ours"}} for trackio.init. Keys and tokens belong into the environment (WANDB_API_KEY)."""
