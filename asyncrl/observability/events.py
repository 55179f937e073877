"""The event log of a run: one typed, versioned JSON line for each thing that happened.

Invariants
- A line is written whole, in one write, and never changed; readers may follow the file.
- Every line carries schema version, job attempt, wall time and kind; the rest are the event's own fields.
- Emitting never raises and never blocks for long: a full disk is counted (`dropped`), not fatal, and once
  there is room again the log itself says how many lines are missing.
- A kind belongs to one class. This module declares the events of the job as a whole; each package declares its own in
  a module `*_events`. `event_kinds` lists them all.
"""

from __future__ import annotations

import dataclasses
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

import asyncrl
from asyncrl.observability.line_file import UNREADABLE, LineFile, encode_line, read_lines, to_plain

__all__ = [
    "SCHEMA_VERSION",
    "UNREADABLE",
    "CheckpointWritten",
    "Event",
    "EventKind",
    "EventLog",
    "EventsLost",
    "FaultSeen",
    "JobEnded",
    "JobStarted",
    "LoopStarted",
    "StepFinished",
    "event_kinds",
    "read_events",
]

SCHEMA_VERSION = 1

_RECENT = 1000
_KINDS: dict[str, type[Event]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events; a subclass names its `kind` and adds fields of plain JSON types."""

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        kind = cls.__dict__.get("kind")
        if kind is None:  # a base that only shares fields
            return
        # A slotted dataclass is created twice, so the same name from the same module replaces itself.
        other = _KINDS.get(kind)
        if other is not None and (other.__module__, other.__name__) != (cls.__module__, cls.__name__):
            raise TypeError(f"event kind {kind!r} is declared by {other.__module__}.{other.__name__} already")
        _KINDS[kind] = cls


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStarted(Event):
    """The driver began an attempt of the job."""

    kind: ClassVar[str] = "job_started"
    pid: int
    ranks: int
    """Trainer ranks."""
    total_steps: int | None = None
    """Steps that the job means to train; None when that is given in epochs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded(Event):
    """The driver is about to exit; a log whose last attempt lacks this line belongs to a job that was killed."""

    kind: ClassVar[str] = "job_ended"
    reason: str
    """`finished`, `stopped by SIGTERM`, or the message of the error."""
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStarted(Event):
    """Everything is up, and the first step begins."""

    kind: ClassVar[str] = "loop_started"
    seconds: float
    """Since the driver began to keep time."""
    phases: dict[str, float]
    """Seconds by phase: `startup`, `warm-up`, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished(Event):
    """A training step is complete: its batch was trained and committed, its weights published where that was due."""

    kind: ClassVar[str] = "step_finished"
    step: int
    """Steps trained so far, this one included."""
    seconds: float
    version: str | None = None
    """Weights that were published after it, as `attempt.step`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten(Event):
    """A checkpoint or an export is complete on disk."""

    kind: ClassVar[str] = "checkpoint_written"
    step: int
    path: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSeen(Event):
    """Something went wrong that the job may survive."""

    kind: ClassVar[str] = "fault_seen"
    component: str
    """Who is at fault, as people call it: `engine-0`, `event loop`, `trainer rank 1`."""
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsLost(Event):
    """Lines before this one could not be written (for example because the disk was full)."""

    kind: ClassVar[str] = "events_lost"
    count: int


class EventLog:
    """Appends events to a file; safe from any thread. `None` as path keeps them in memory only (tests).

    Raises RunDirectoryError when the file cannot be opened.
    """

    def __init__(self, path: Path | None, attempt: int = 0) -> None:
        self.attempt = attempt
        self.recent: list[dict[str, Any]] = []
        """The latest lines, oldest first; at least the last 1000."""
        self._lock = threading.Lock()
        self._file = None if path is None else LineFile(path)
        self._told_lost = 0
        self._listeners: list[Callable[[dict[str, Any]], None]] = []

    @property
    def dropped(self) -> int:
        """Lines that could not be written."""
        return 0 if self._file is None else self._file.lost

    def emit(self, event: Event) -> None:
        """Appends one event."""
        with self._lock:
            line = self._line(event)
            self.recent.append(line)
            if len(self.recent) >= 2 * _RECENT:
                del self.recent[:-_RECENT]
            if self._file is not None:
                self._append(line, self._file)
        for listener in self._listeners:
            listener(line)

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Calls `listener` with each later event, as a line of the log, in the thread that emits it."""
        self._listeners.append(listener)

    def close(self) -> None:
        """Closes the file; what is emitted later is kept in `recent` only."""
        if self._file is not None:
            self._file.close()

    def _append(self, line: dict[str, Any], file: LineFile) -> None:
        lost = file.lost
        data = encode_line(line)
        if lost > self._told_lost:
            data = encode_line(self._line(EventsLost(count=lost - self._told_lost))) + data
        if file.append(data):
            self._told_lost = lost

    def _line(self, event: Event) -> dict[str, Any]:
        line: dict[str, Any] = {"v": SCHEMA_VERSION, "attempt": self.attempt, "time": time.time(), "kind": event.kind}
        line.update(msgspec.to_builtins(event, enc_hook=to_plain))
        return line


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of an event log, in order, whatever their kind.

    A torn last line is left out; a damaged line elsewhere becomes `{"kind": "unreadable", "line": n, "text": ...}`.
    """
    return read_lines(path)


@dataclass(frozen=True, slots=True)
class EventKind:
    """What can stand in a log under one kind."""

    kind: str
    declared_in: str
    """Module of its class."""
    doc: str
    fields: dict[str, str]
    """Type of each field as it is written in the class."""
    schema: dict[str, Any]
    """JSON schema of the event's own fields."""


def event_kinds() -> tuple[EventKind, ...]:
    """Returns every kind that the package declares, sorted; imports every module `*_events` to find them."""
    root = Path(asyncrl.__file__).parent
    for module in root.rglob("*_events.py"):
        importlib.import_module(".".join((root.name, *module.relative_to(root).with_suffix("").parts)))
    return tuple(
        EventKind(
            kind=kind,
            declared_in=cls.__module__,
            doc=(cls.__doc__ or "").strip(),
            fields={f.name: str(f.type) for f in dataclasses.fields(cls)},
            schema=msgspec.json.schema(cls),
        )
        for kind, cls in sorted(_KINDS.items())
    )
