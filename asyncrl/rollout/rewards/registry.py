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
    function: Callable[..., Any]
    """As it was found."""
    runs: Runs
    directory: str
    """Working directory in which the name was looked up; a worker looks there too."""
    scope: RewardScope = "sample"

    @property
    def call(self) -> Callable[..., Any]:
        """Called with (sample, prompt), or with (samples, prompt) where it scores groups; `args` are bound."""
        return partial(self.function, **self.args)

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


def resolve_reward(name: str, args: Mapping[str, Any], scope: RewardScope = "sample") -> RewardFunction:
    """The function `name` (registry or dotted path) with `args` bound.

    Raises RewardError as `load_reward` does, and for a function that cannot be called with these arguments, scores
    something else than `scope` says, or has the parameters by which another framework calls rewards.
    """
    reward = load_reward(name, args, scope)
    _check_signature(reward)
    return reward


def load_reward(name: str, args: Mapping[str, Any], scope: RewardScope = "sample") -> RewardFunction:
    """As `resolve_reward`, without a look at the parameters, which a worker's driver has had.

    Raises RewardError for an unknown name, and for a path that does not import.
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
    return RewardFunction(name, dict(args), function, runs, os.getcwd(), scope)


def _check_signature(reward: RewardFunction) -> None:
    # The configuration is no part of a worker's imports, so it is imported where it is needed.
    from asyncrl.config.checks.reward_signature import signature_problems

    try:
        signature = inspect.signature(reward.function)
    except ValueError:  # a callable written in C tells no signature
        return
    for problem in signature_problems(reward.name, signature, reward.args, reward.scope):
        raise RewardError(str(problem))


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
