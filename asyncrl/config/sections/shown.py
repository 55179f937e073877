"""What a run shows of itself beside its figures: samples as text."""

from __future__ import annotations

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
