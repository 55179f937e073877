"""Whether trainer and engine compute the same model, as the metrics of a step tell. Pure.

In float32 both compute the same log-probs to about 1e-5 for tokens made by the very weights that the trainer holds. A
difference far over that says that the engine holds or computes another model, on which the policy would be trained.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config.layout import DType

LARGEST_MEAN = 1e-3
"""Largest mean |difference| in nat that rounding explains in float32; measured below 1e-4."""
LARGEST = 0.1
"""Largest |difference| of one token that rounding explains."""


def disagreement(metrics: Mapping[str, float], dtype: DType) -> str | None:
    """What to tell the user of the metrics of one step; None where all is well, or where `dtype` rounds coarsely."""
    mean, largest = metrics.get("train/logprob_diff_mean", 0.0), metrics.get("train/logprob_diff_max", 0.0)
    if dtype != "float32" or (mean <= LARGEST_MEAN and largest <= LARGEST):
        return None
    return (
        f"trainer and engine disagree: their log-probs differ by {mean:.3g} nat in the mean and {largest:.3g} at most, "
        "over tokens made by the very weights that the trainer holds; in float32 that is under 1e-4. The engine "
        "computes another model: look at engine.server_args and at the files of model.path; --debug.train-only on "
        "saved rollouts (--debug.save-rollouts) says at which token of which sample"
    )
