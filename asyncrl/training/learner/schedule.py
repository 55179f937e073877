"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    decay: Literal["constant", "linear", "cosine"],
    total_steps: int | None,
) -> float:
    """Learning rate of `step` (from 0).

    It rises linearly over the first `warmup_steps`; step 0 already trains, at peak / warmup_steps. Then it falls so
    that it would be 0 at `total_steps`, one after the last step. Without `total_steps` it stays at `peak`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if decay == "constant" or total_steps is None or total_steps <= warmup_steps:
        return peak
    progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    if decay == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
