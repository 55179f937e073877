"""The registry of waits behind every deadline of the job: what each wait is for, from whom, since when.

Invariants
- A wait on anything outside this process goes through `waiting`, so it has a deadline and a name while it lasts.
- `WAITS.snapshot()` may be called from any thread.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import anyio


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait in progress."""

    what: str
    """The awaited thing, as a noun phrase: `first generation`, `checksum`."""
    subject: str
    """The part of the job that is to deliver it: `engine-0`, `trainer rank 1`."""
    since: float
    """time.monotonic() at the start of the wait."""
    deadline_s: float
    """Seconds allowed for the whole wait; infinite for a wait without a deadline."""
    stood_still_s: float = field(default=0.0, compare=False)
    """Seconds of the wait that do not count, because the clock of its deadline stood still (a pause of the engines)."""

    def age_s(self, now: float) -> float:
        """Returns the seconds waited at monotonic time `now`, without those that do not count."""
        return max(0.0, now - self.since - self.stood_still_s)

    def describe(self, now: float) -> str:
        """`first generation from engine-0, 12.3 s of 600 s`."""
        allowed = f"of {self.deadline_s:g} s" if math.isfinite(self.deadline_s) else "without a deadline"
        return f"{self.what} from {self.subject}, {self.age_s(now):.1f} s {allowed}"


class WaitSource(Protocol):
    """Keeps its own table of waits, for a part of the job that has very many."""

    def waits(self) -> Iterable[Wait]:
        """Returns its waits in progress; may be called from any thread."""


class WaitRegistry:
    """The waits in progress; safe from any thread."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}
        self._sources: dict[WaitSource, None] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()

    def register(self, what: str, subject: str, deadline_s: float) -> _Registered:
        """Registers a wait while the returned context is entered, and leaves its deadline to the caller.

        For waits in threads, where the called library enforces the deadline, and for waits watched by progress.
        """
        return _Registered(self, what, subject, deadline_s)

    def add(self, source: WaitSource) -> None:
        """Includes the waits of `source` in later snapshots."""
        with self._lock:
            self._sources[source] = None

    def remove(self, source: WaitSource) -> None:
        """Undoes `add`; raises KeyError for a source that was not added."""
        with self._lock:
            del self._sources[source]

    def snapshot(self) -> tuple[Wait, ...]:
        """Returns all waits in progress, oldest first."""
        with self._lock:
            waits, sources = [*self._waits.values()], [*self._sources]
        waits += (wait for source in sources for wait in source.waits())
        return tuple(sorted(waits, key=lambda wait: wait.since))


class _Registered:
    """Keeps one wait in the registry while its body runs."""

    __slots__ = ("_deadline_s", "_key", "_registry", "_subject", "_what")

    def __init__(self, registry: WaitRegistry, what: str, subject: str, deadline_s: float) -> None:
        self._registry, self._what, self._subject, self._deadline_s = registry, what, subject, deadline_s

    def __enter__(self) -> None:
        registry = self._registry
        wait = Wait(self._what, self._subject, time.monotonic(), self._deadline_s)
        self._key = next(registry._ids)
        with registry._lock:
            registry._waits[self._key] = wait

    def __exit__(self, *_: object) -> None:
        registry = self._registry
        with registry._lock:
            del registry._waits[self._key]


class _Waiting:
    """A registered wait that raises TimeoutError at its deadline."""

    __slots__ = ("_awaited", "_registered", "_scope", "_timeout_s")

    def __init__(self, what: str, subject: str, timeout_s: float) -> None:
        self._registered = WAITS.register(what, subject, timeout_s)
        self._timeout_s = timeout_s
        self._awaited = what, subject

    def __enter__(self) -> None:
        self._registered.__enter__()
        self._scope = anyio.move_on_after(self._timeout_s)
        self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool | None:
        try:
            swallowed = self._scope.__exit__(kind, error, at)
        finally:
            self._registered.__exit__()
        if self._scope.cancelled_caught:
            what, subject = self._awaited
            raise TimeoutError(f"no {what} from {subject} after {self._timeout_s:g} s") from None
        return swallowed


WAITS = WaitRegistry()
"""The waits of this process."""


def waiting(what: str, subject: str, timeout_s: float) -> AbstractContextManager[None]:
    """Registers a wait of async code, and raises TimeoutError after `timeout_s`, which names `what` and `subject`.

        with waiting("checksum", "engine-0", 60.0):
            await engine.checksum()

    A TimeoutError of the body itself (a nested wait, a socket) passes through unchanged.
    """
    return _Waiting(what, subject, timeout_s)


def format_waits(waits: Sequence[Wait] | None = None, *, waiter: str = "driver", now: float | None = None) -> str:
    """Formats waits, by default all in progress: `driver waits for: checksum from engine-0, 12.3 s of 600 s`.

    One line per wait, in the given order. `now` is a monotonic time, by default the current one.
    """
    if waits is None:
        waits = WAITS.snapshot()
    if now is None:
        now = time.monotonic()
    if not waits:
        return f"{waiter} waits for nothing outside itself"
    return "\n".join(f"{waiter} waits for: {wait.describe(now)}" for wait in waits)
