"""Problems of a configuration, as data. A user hears of all of them at once, one a line.

Invariant: the text of a problem never holds a secret. Values pass through `redaction.shown`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that cannot work, and what to do about it."""

    key: str
    """Dotted key, as the user would write it: `train.lr`."""
    text: str
    """What is wrong, and how to mend it."""
    source: str | None = None
    """Where the value comes from: a file, or the option on the command line."""

    def __str__(self) -> str:
        where = f" (from {self.source})" if self.source not in (None, "default") else ""
        return f"{self.key}: {self.text}{where}"


class Problems(list[Problem]):
    """Problems that are collected on the way, so that a user hears of all of them at once."""

    def add(self, key: str, text: str, source: str | None = None) -> None:
        """One more problem; see `Problem`."""
        self.append(Problem(key, text, source))


class InvalidConfigError(ConfigError):
    """All problems of one configuration."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__(self._message(self.problems))

    @staticmethod
    def _message(problems: Sequence[Problem]) -> str:
        if len(problems) == 1:
            return str(problems[0])
        return f"{len(problems)} problems in the configuration:\n" + "\n".join(f"  {p}" for p in problems)
