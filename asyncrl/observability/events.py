"""The event log of a run: one typed, versioned JSON line for each thing that happened.

Invariants
- A line is written whole, in one write, and never changed. Readers may follow the file.
- Every line carries schema version, job attempt, wall time and kind, and then the event's own fields.
- `emit` never raises and never blocks for long. A full disk only counts lines as lost (`dropped`); once there is room
  again, the log itself says how many lines are missing.
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
"""Version of the lines' common fields."""

_RECENT = 1000
_KINDS: dict[str, type[Event]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events. A subclass sets its `kind` and adds fields of plain JSON types."""

    kind: ClassVar[str]
    """Name under which the log has events of this class: `step_finished`."""

    def __init_subclass__(cls) -> None:
        kind = cls.__dict__.get("kind")
        if kind is None:  # a base class that only shares fields
            return
        # Python creates a slotted dataclass twice, so a class may replace one of the same name and module.
        other = _KINDS.get(kind)
        if other is not None and (other.__module__, other.__name__) != (cls.__module__, cls.__name__):
            raise TypeError(f"{other.__module__}.{other.__name__} already declares event kind {kind!r}; choose another")
        _KINDS[kind] = cls


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStarted(Event):
    """The driver began an attempt of the job."""

    kind: ClassVar[str] = "job_started"
    pid: int
    ranks: int
    """Number of trainer ranks."""
    total_steps: int | None = None
    """Number of steps that the job is to train; None if the configuration gives epochs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded(Event):
    """The driver is about to exit. If the last attempt in a log lacks this event, the job was killed."""

    kind: ClassVar[str] = "job_ended"
    reason: str
    """`finished`, `stopped by SIGTERM`, or the message of the error."""
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStarted(Event):
    """Start-up is over, and the first step begins."""

    kind: ClassVar[str] = "loop_started"
    seconds: float
    """Duration of start-up, from the moment in which the driver began to measure time."""
    phases: dict[str, float]
    """Seconds by phase: `startup`, `warm-up`, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished(Event):
    """A training step is complete: its batch is trained and committed, and its weights are published if due."""

    kind: ClassVar[str] = "step_finished"
    step: int
    """Steps trained so far, this one included."""
    seconds: float
    """Wall time of the step."""
    version: str | None = None
    """Weights published after the step, as `attempt.step`; None if none were due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten(Event):
    """A checkpoint or an export is complete on disk."""

    kind: ClassVar[str] = "checkpoint_written"
    step: int
    """Steps trained."""
    path: str
    """Directory of the checkpoint or export."""
    seconds: float
    """Duration of the writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSeen(Event):
    """Something went wrong, and the job may survive it."""

    kind: ClassVar[str] = "fault_seen"
    component: str
    """The part at fault, by its usual name: `engine-0`, `event loop`, `trainer rank 1`."""
    what: str
    """What went wrong, as a phrase after the component's name: `blocked for 3.2 s by ...`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsLost(Event):
    """Lines before this one could not be written (for example because the disk was full)."""

    kind: ClassVar[str] = "events_lost"
    count: int
    """Number of lines lost since the line before."""


class EventLog:
    """Appends events to a file; safe from any thread. With `None` as path, events stay in memory only (for tests).

    Raises RunDirectoryError when the file cannot be opened.
    """

    def __init__(self, path: Path | None, attempt: int = 0) -> None:
        self.attempt = attempt
        """Attempt of the job that is written into each line."""
        self.recent: list[dict[str, Any]] = []
        """The latest lines, oldest first: at least the last 1000, if there are so many."""
        self._lock = threading.Lock()
        self._file = None if path is None else LineFile(path)
        self._told_lost = 0
        self._listeners: list[Callable[[dict[str, Any]], None]] = []

    @property
    def dropped(self) -> int:
        """Number of lines that could not be written."""
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
        """Calls `listener` with the log line of each later event, in the thread that emits the event."""
        self._listeners.append(listener)

    def close(self) -> None:
        """Closes the file; later events go to `recent` only."""
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
    """Yields the lines of an event log in order, of all kinds.

    Leaves out a torn last line. Any other damaged line becomes `{"kind": "unreadable", "line": n, "text": ...}`.
    """
    return read_lines(path)


@dataclass(frozen=True, slots=True)
class EventKind:
    """Description of one kind of event."""

    kind: str
    """`step_finished`."""
    declared_in: str
    """Module of the event's class."""
    doc: str
    """Docstring of the event's class."""
    fields: dict[str, str]
    """Type of each field, as written in the class."""
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
