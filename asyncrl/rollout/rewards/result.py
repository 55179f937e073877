"""What a reward function may return, judged alike wherever it runs."""

from __future__ import annotations

import math
import numbers
import struct
from collections.abc import Mapping
from itertools import islice
from typing import Any, Literal

import msgspec

from asyncrl.errors import counted

RewardScope = Literal["sample", "group"]
"""What one call of a reward function scores: one sample, or all samples of a group. As in `reward.scope`."""

_REWARD_ENTRIES = ("score", "reward")
"""Entries of a returned dict that are the reward, the first one first."""

ABSTAINED = "the reward abstained"
"""Failure of a sample for which a reward of groups returned None. It is no fault of anything."""


def is_fault(failure: str | None) -> bool:
    """Whether a sample has no reward because something went wrong."""
    return failure is not None and failure != ABSTAINED


class Score(msgspec.Struct, frozen=True, gc=False):
    """The outcome for one sample: a reward, or why there is none. A failure is never a zero."""

    reward: float | None
    failure: str | None = None
    parts: dict[str, float] = {}
    """Named numbers that came with the reward, or whose sum it is."""


def judge_result(value: Any) -> Score:
    """A number is a reward, if training can hold it; a dict is a reward and its parts.

    Of a dict the entry `score` (else `reward`) is the reward, and the other numbers are its parts. Without either the
    reward is the sum of all entries, which are numbers then. Anything else is a failure that says what came back.
    """
    if isinstance(value, Mapping):
        return _judge_parts(value)
    if _is_number(value):
        return _judge_number("the reward", value)
    if hasattr(value, "__await__"):
        value.close()
        return Score(None, "the reward function returned a coroutine; declare it with `async def`")
    return Score(None, f"the reward function returned {type(value).__name__}, not a number")


def _judge_parts(value: Mapping[Any, Any]) -> Score:
    name = next((name for name in _REWARD_ENTRIES if name in value), None)
    others = {str(key): part for key, part in value.items() if key != name}
    if name is None and not others:
        return Score(None, "the reward function returned an empty dict")
    parts: dict[str, float] = {}
    for key, part in others.items():
        if not _is_number(part):
            if name is not None:
                continue  # a text that came along, such as the answer that was found
            kind = type(part).__name__
            return Score(None, f"the reward function returned no `score`, and {key!r} of its dict is {kind}, no number")
        judged = _judge_number(f"part {key!r} of the reward", part)
        if judged.reward is None:
            return judged
        parts[key] = judged.reward
    score = sum(parts.values()) if name is None else value[name]
    if not _is_number(score):
        return Score(None, f"the reward function returned {type(score).__name__} as {name!r}, not a number")
    judged = _judge_number("the reward", score)
    return Score(judged.reward, judged.failure, parts if judged.reward is not None else {})


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or (hasattr(value, "item") and getattr(value, "shape", None) == ())


def _judge_number(what: str, value: Any) -> Score:
    """The number, as it will be in a batch."""
    try:
        number = float(value)
        if math.isfinite(number):
            struct.pack("<f", number)  # raises for what rounds to infinity; native "f" does not
            return Score(number)
    except (OverflowError, TypeError, ValueError):  # also of an int beyond float64
        return Score(None, f"{what} is {str(value)[:40]}, which float32 cannot hold; training computes in float32")
    return Score(None, f"{what} is {number}")


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
        return failed(samples, f"the reward function returned {found} numbers for {counted(samples, 'sample')}")
    return tuple(Score(None, ABSTAINED) if result is None else judge_result(result) for result in results)


def failed(samples: int, failure: str) -> tuple[Score, ...]:
    """The scores of a call that failed: so many times the same failure."""
    return (Score(None, failure),) * samples
