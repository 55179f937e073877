"""From the name in the configuration to a callable, and where it may run."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from asyncrl.data.dotted_path import resolve_dotted_path
from asyncrl.errors import RewardError
from asyncrl.rollout.rewards import builtin


class Runs(StrEnum):
    """Where a reward function runs."""

    INLINE = "inline"
    """In the event loop: microseconds, and cannot hang."""
    LOOP = "loop"
    """Async: in the event loop, under a deadline."""
    WORKER = "worker"
    """Sync: in a worker process that can be killed."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A resolved reward."""

    name: str
    args: Mapping[str, Any]
    call: Callable[..., Any]
    """Called with (sample, prompt); `args` are bound."""
    runs: Runs
    directory: str
    """Working directory in which the name was looked up; a worker looks there too."""


_INLINE: dict[str, Callable[..., float]] = {"exact_match": builtin.exact_match, "length": builtin.length}
_WORKER: dict[str, Callable[..., float]] = {"math_verify": builtin.math_verify, "reasoning_gym": builtin.reasoning_gym}


def resolve_reward(name: str, args: Mapping[str, Any]) -> RewardFunction:
    """The function `name` (registry or dotted path) with `args` bound; RewardError where that cannot be."""
    if ":" in name:
        function = resolve_dotted_path(name, setting="reward.function", error=RewardError)
        runs = Runs.LOOP if _is_async(function) else Runs.WORKER
    elif name in _INLINE:
        function, runs = _INLINE[name], Runs.INLINE
    elif name in _WORKER:
        function, runs = _WORKER[name], Runs.WORKER
    else:
        names = [*_INLINE, *_WORKER]
        close = difflib.get_close_matches(name, names, n=1)
        known = f"known are {', '.join(names)}, and any package.module:function"
        hint = f"did you mean {close[0]!r}?" if close else known
        raise RewardError(f"reward.function: there is no reward {name!r}; {hint}")
    try:
        inspect.signature(function).bind(None, None, **args)
    except TypeError as error:
        raise RewardError(
            f"reward.args: {name} is called as (sample, prompt, **args), which it does not take: {error}"
        ) from error
    except ValueError:  # a callable written in C tells no signature
        pass
    return RewardFunction(name, dict(args), partial(function, **args), runs, os.getcwd())


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
