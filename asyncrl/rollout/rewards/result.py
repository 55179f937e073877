"""What a reward function may return, judged alike wherever it runs."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from itertools import islice
from typing import Any, Literal

import msgspec

RewardScope = Literal["sample", "group"]
"""What one call of a reward function scores: one sample, or all samples of a group. As in `reward.scope`."""

ABSTAINED = "the reward abstained"
"""Failure of a sample for which a reward of groups returned None. It is no fault of anything."""


def is_fault(failure: str | None) -> bool:
    """Whether a sample has no reward because something went wrong."""
    return failure is not None and failure != ABSTAINED


class Score(msgspec.Struct, frozen=True, gc=False):
    """The outcome for one sample: a reward, or why there is none. A failure is never a zero."""

    reward: float | None
    failure: str | None = None


def judge_result(value: Any) -> Score:
    """A finite number is a reward; anything else is a failure that says what came back."""
    if isinstance(value, numbers.Real) or (hasattr(value, "item") and getattr(value, "shape", None) == ()):
        reward = float(value)
        return Score(reward) if math.isfinite(reward) else Score(None, f"the reward is {reward}")
    if hasattr(value, "__await__"):
        value.close()
        return Score(None, "the reward function returned a coroutine; declare it with `async def`")
    return Score(None, f"the reward function returned {type(value).__name__}, not a number")


def judge_results(value: Any, samples: int) -> tuple[Score, ...]:
    """The scores of a group of `samples`: one number for each sample, or None to abstain.

    Anything else fails all of them. Raises what the iteration over `value` raises.
    """
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        failure = judge_result(value).failure or "the reward function returned one number"
        return failed(samples, f"{failure}; with reward.scope = group it must return a number for each sample")
    results = list(islice(value, samples + 1))
    if len(results) != samples:
        found = f"{len(results)}" if len(results) < samples else f"more than {samples}"
        return failed(samples, f"the reward function returned {found} numbers for {samples} samples")
    return tuple(Score(None, ABSTAINED) if result is None else judge_result(result) for result in results)


def failed(samples: int, failure: str) -> tuple[Score, ...]:
    """The scores of a call that failed: so many times the same failure."""
    return (Score(None, failure),) * samples
