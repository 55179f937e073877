"""Group filters take finished groups out of training, each with a reason. The first objection counts.

A filter is called in the event loop with a whole SampleGroup, including its failed samples, and must be quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.data.dotted_path import resolve_dotted_path
from asyncrl.data.sample import SampleGroup
from asyncrl.errors import ConfigError, RolloutError, describe_exception


def zero_variance(group: SampleGroup) -> str | None:
    """Objects to a group whose rewards are all equal: every advantage of GRPO would be 0."""
    rewards = {sample.reward for sample in group.samples if sample.reward is not None}
    return "all rewards are equal" if len(rewards) == 1 else None


BUILTIN: Mapping[str, Callable[[SampleGroup], str | None]] = {"zero_variance": zero_variance}


class Filters:
    """The filters that a configuration names."""

    def __init__(self, names: Sequence[str]) -> None:
        """Imports the user's filters. Raises ConfigError where that fails."""
        self._filters: list[tuple[str, Callable[[SampleGroup], Any]]] = [
            (name, BUILTIN.get(name) or resolve_dotted_path(name, setting="rollout.filters", error=ConfigError))
            for name in names
        ]

    def objection(self, group: SampleGroup) -> str | None:
        """Why to take `group` out, or None. Raises RolloutError for a filter that fails or returns no reason."""
        for name, judge in self._filters:
            try:
                answer = judge(group)
            except Exception as error:  # whatever the user's function raises
                raise RolloutError(
                    f"rollout.filters: {name} failed on group {group.group_id}: {describe_exception(error)}"
                ) from error
            if answer is not None and not isinstance(answer, str):
                raise RolloutError(
                    f"rollout.filters: {name} returned {answer!r} for group {group.group_id}; it must return None to "
                    "keep a group, or the reason to take it out"
                )
            if answer:
                return answer
        return None
