"""The event log of a run: one typed, versioned JSON line for each thing that happened.

Invariants
- A line is written whole, in one write, and never changed; readers may follow the file.
- Every line carries schema version, job attempt, wall time and kind; the rest are the event's own fields.
- Emitting never raises and never blocks for long: a full disk is counted (`dropped`), not fatal.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events; a subclass names its `kind` and adds fields of plain JSON types."""

    kind: ClassVar[str]


class EventLog:
    """Appends events to a file; safe from any thread. `None` as path keeps them in memory only (tests)."""

    def __init__(self, path: Path | None, attempt: int = 0) -> None:
        self.attempt = attempt
        self.dropped = 0
        self.recent: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._fd = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def emit(self, event: Event) -> None:
        line = {"v": SCHEMA_VERSION, "attempt": self.attempt, "time": time.time(), "kind": event.kind}
        line |= msgspec.to_builtins(event)
        with self._lock:
            self.recent.append(line)
            del self.recent[:-1000]
            if self._fd is None:
                return
            try:
                os.write(self._fd, msgspec.json.encode(line) + b"\n")
            except OSError:
                self.dropped += 1

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
