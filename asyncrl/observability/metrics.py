"""The metrics of a run: one JSON line per step in metrics.jsonl, and the wall time by phase.

Invariants
- Keys are flat and named `section/name`: `rollout/reward_mean`, `train/loss`, `time/generate_s`, `weights/pause_s`.
- A line holds finite numbers only. A NaN or infinite value is null, and `nonfinite` has it as text.
- The phases of a step do not overlap. Their seconds, with `other` for the rest, add up exactly to the step's wall time.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from asyncrl.errors import RunDirectoryError
from asyncrl.observability.line_file import UNREADABLE, LineFile, encode_line, read_lines

_SECTION = re.compile(r"[a-z0-9_]+")
_NO_NAME = re.compile(r"[^A-Za-z0-9_.@-]+")

OTHER = "other"
"""Phase of all time that no named phase covers."""

PHASES: Mapping[str, str] = {
    "startup": "until the first step may begin: engines, router, data, trainer, first publication",
    "warm-up": "supervised steps before the first step of the loop",
    "eval": "evaluation on held-out prompts",
    "generate": "the trainer waits for its batch, which is generated only now",
    "wait": "the trainer waits for its batch, which is generated ahead: what overlap did not hide",
    "train": "training, and on shared GPUs the change of turns",
    "checkpoint": "the part of a checkpoint that the loop waits for",
    "publish": "publication of new weights to the engines",
    "export": "the Hugging Face export at the end",
    OTHER: "all the rest",
}
"""What the time of each phase is spent on."""


def metric_key(key: str) -> str:
    """`section/name` with `_` for what a tracker would not take: names may come from a user's reward or loss.

    Raises ValueError for a key without section or name.
    """
    section, _, name = key.partition("/")
    if not _SECTION.fullmatch(section) or not name:
        raise ValueError(f"metric {key!r} is not named section/name")
    return "/".join([section, *(_NO_NAME.sub("_", part) or "_" for part in name.split("/"))])


def metric_line(step: int, attempt: int, metrics: Mapping[str, SupportsFloat]) -> dict[str, Any]:
    """Returns the line of one step.

    Raises ValueError as `metric_key` does, and TypeError for a value that is not a number.
    """
    line: dict[str, Any] = {"step": step, "attempt": attempt, "time": time.time()}
    nonfinite: dict[str, str] = {}
    for key, value in metrics.items():
        key = metric_key(key)
        if isinstance(value, str):
            raise TypeError(f"metric {key} is text ({value!r}), not a number")
        number = float(value)
        if math.isfinite(number):
            line[key] = value if type(value) is int else number
        else:
            line[key] = None
            nonfinite[key] = str(number)
    if nonfinite:
        line["nonfinite"] = nonfinite
    return line


class MetricsLog:
    """Appends to metrics.jsonl; safe from any thread. Raises RunDirectoryError when the file cannot be opened."""

    def __init__(self, path: Path, attempt: int = 0) -> None:
        self._file = LineFile(path)
        self._attempt = attempt

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Appends the metrics of `step` (steps trained so far, including this one; 0 is before training).

        Raises RunDirectoryError when the line cannot be written: a run that cannot keep its results should end.
        """
        if not self._file.append(encode_line(metric_line(step, self._attempt, metrics))):
            reason = self._file.last_error.strerror if self._file.last_error else "the file is closed"
            raise RunDirectoryError(
                f"{self._file.path}: step {step} could not be written ({reason}); free space there and run again"
            )

    def earlier(self, step: int) -> list[dict[str, Any]]:
        """The lines that earlier attempts wrote of their first `step` steps: of each step and evaluation, the last."""
        kept: dict[tuple[int, bool], dict[str, Any]] = {}
        for line in read_metrics(self._file.path):
            if line.get("attempt", self._attempt) < self._attempt and line.get("step", step + 1) <= step:
                kept[line["step"], "eval/accuracy" in line] = line
        return list(kept.values())

    def close(self) -> None:
        """Closes the file. May be called again."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a metrics.jsonl in order, without damaged ones.

    A step that a later attempt trained again appears again.
    """
    return (line for line in read_lines(path) if line.get("kind") != UNREADABLE)


def phase_name(text: str) -> str:
    """Returns a phase without its count: `warm-up 40/200` is phase `warm-up`."""
    return text.rstrip("0123456789/ ")


@dataclass(frozen=True, slots=True)
class StepTime:
    """The wall time of a step, or of a whole run, by phase."""

    seconds: float
    """All of it."""
    phases: Mapping[str, float]
    """Seconds by phase, in order of first appearance and `other` last; they add up to `seconds`."""

    def metrics(self) -> dict[str, float]:
        """Returns the metrics `time/step_s` and `time/<phase>_s`."""
        return {"time/step_s": self.seconds} | {f"time/{name}_s": seconds for name, seconds in self.phases.items()}


class StepTimer:
    """Counts every moment since its creation as time of exactly one phase.

        with timer.phase("generate"): ...      # phases may nest: the outer phase does not get the inner one's time
        step_time = timer.finish_step()

    `PHASES` are those in use. A count at the end (`warm-up 40/200`) is for the display only. The timer calls `on_phase`
    (such as a display's `phase`) at each change. It times the one task that drives the loop and does not support
    concurrent tasks.
    """

    def __init__(
        self, *, on_phase: Callable[[str], None] | None = None, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._clock_ns = clock_ns
        self._on_phase = on_phase
        self._stack: list[tuple[object, str]] = []
        self._mark = clock_ns()
        self._step_ns: dict[str, int] = {}
        self._total_ns: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of its body as `name`."""
        token = object()
        self._account()
        self._stack.append((token, name))
        self._tell()
        try:
            yield
        finally:
            self._account()
            self._stack = [entry for entry in self._stack if entry[0] is not token]
            self._tell()

    def finish_step(self) -> StepTime:
        """Ends the step that began at the last call (or at creation), returns its time, and begins the next step."""
        self._account()
        step, self._step_ns = self._step_ns, {}
        return self._as_time(step)

    def totals(self) -> StepTime:
        """Returns all time since creation, including the unfinished step."""
        self._account()
        return self._as_time(self._total_ns)

    def _account(self) -> None:
        now = self._clock_ns()
        elapsed, self._mark = now - self._mark, now
        name = phase_name(self._stack[-1][1]) if self._stack else OTHER
        for account in (self._step_ns, self._total_ns):
            account[name] = account.get(name, 0) + elapsed

    def _tell(self) -> None:
        if self._on_phase is not None:
            self._on_phase(self._stack[-1][1] if self._stack else OTHER)

    @staticmethod
    def _as_time(account: Mapping[str, int]) -> StepTime:
        named = {name: ns / 1e9 for name, ns in account.items() if name != OTHER}
        return StepTime(sum(account.values()) / 1e9, named | {OTHER: account.get(OTHER, 0) / 1e9})
