"""From the name of a reward in the configuration to a function that can be called, and where it may run."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from asyncrl.data.dotted_path import resolve_dotted_path
from asyncrl.data.sample import Prompt, Sample
from asyncrl.errors import RewardError
from asyncrl.rollout.rewards import builtin
from asyncrl.rollout.rewards.result import RewardScope, Score, judge_result, judge_results


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
    """Called with (sample, prompt), or with (samples, prompt) where it scores groups; `args` are bound."""
    runs: Runs
    directory: str
    """Working directory in which the name was looked up; a worker looks there too."""
    scope: RewardScope = "sample"

    def __call__(self, samples: Sequence[Sample], prompt: Prompt) -> Any:
        """What the user's function returns, an awaitable where it is async. `samples` is one where it scores one."""
        return self.call(tuple(samples) if self.scope == "group" else samples[0], prompt)

    def subject(self, samples: Sequence[Sample]) -> str:
        """The id of what a call for these samples scores."""
        return samples[0].group_id if self.scope == "group" else samples[0].sample_id

    def judge(self, value: Any, samples: int) -> tuple[Score, ...]:
        """The scores of so many samples for the value that the function returned."""
        return judge_results(value, samples) if self.scope == "group" else (judge_result(value),)


_INLINE: dict[str, Callable[..., float]] = {"exact_match": builtin.exact_match, "length": builtin.length}
_WORKER: dict[str, Callable[..., float]] = {"math_verify": builtin.math_verify, "reasoning_gym": builtin.reasoning_gym}
_FIRST_PARAMETERS: Mapping[str, RewardScope] = {"sample": "sample", "samples": "group", "group": "group"}
"""What a function scores whose first parameter has such a name."""


def resolve_reward(name: str, args: Mapping[str, Any], scope: RewardScope = "sample") -> RewardFunction:
    """The function `name` (registry or dotted path) with `args` bound.

    Raises RewardError for an unknown name, for a path that does not import, and for a function that cannot be called
    with these arguments or scores something else than `scope` says.
    """
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
    _check_signature(name, function, args, scope)
    return RewardFunction(name, dict(args), partial(function, **args), runs, os.getcwd(), scope)


def _check_signature(name: str, function: Callable[..., Any], args: Mapping[str, Any], scope: RewardScope) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a callable written in C tells no signature
        return
    called_as = f"({'samples' if scope == 'group' else 'sample'}, prompt, **args)"
    try:
        signature.bind(None, None, **args)
    except TypeError as error:
        raise RewardError(f"reward.args: {name} is called as {called_as}, which it does not take: {error}") from error
    first = next(iter(signature.parameters))
    meant = _FIRST_PARAMETERS.get(first, scope)
    if meant != scope:
        raise RewardError(
            f"reward.scope: {name} is called as {called_as}, and its first parameter is `{first}`; set reward.scope = "
            f'"{meant}", or rename the parameter'
        )


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
