"""What a reward function may return, judged alike wherever it runs."""

from __future__ import annotations

import math
import numbers
from typing import Any

import msgspec


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


def describe_exception(error: BaseException) -> str:
    """One line: kind, message, and the place in the user's code. Raises nothing, whatever `error` is made of."""
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        place = f" ({code.co_filename}:{traceback.tb_lineno} in {code.co_name})"
        traceback = traceback.tb_next
    try:
        message = str(error)
    except Exception as second:
        message = f"no message, for its __str__ raised {type(second).__name__}"
    return f"{type(error).__name__}: {message}{place}"[:500]
