"""Who waits for what, since when: the registry behind every deadline of the job.

Invariant: a wait on anything outside this process goes through `waiting`, so it has a deadline and
can be named while it lasts. `WAITS.snapshot()` may be called from any thread.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import anyio


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait in progress."""

    what: str
    """What is awaited, as a noun phrase: `first generation`, `checksum`."""
    subject: str
    """Whom it is awaited from: `engine-0`, `trainer rank 1`."""
    since: float
    """time.monotonic() at its start."""
    deadline_s: float
    """Seconds allowed in all."""

    def age_s(self, now: float) -> float:
        """Seconds waited at monotonic time `now`."""
        return max(0.0, now - self.since)

    def describe(self, now: float) -> str:
        """`first generation from engine-0, 12.3 s of 600 s`."""
        allowed = f"of {self.deadline_s:g} s" if math.isfinite(self.deadline_s) else "without a deadline"
        return f"{self.what} from {self.subject}, {self.age_s(now):.1f} s {allowed}"


class WaitRegistry:
    """Waits in progress, oldest first."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()

    @contextmanager
    def register(self, what: str, subject: str, deadline_s: float) -> Iterator[None]:
        """Registers without enforcing: for waits in threads, whose deadline the called library enforces."""
        key = next(self._ids)
        with self._lock:
            self._waits[key] = Wait(what, subject, time.monotonic(), deadline_s)
        try:
            yield
        finally:
            with self._lock:
                del self._waits[key]

    def snapshot(self) -> tuple[Wait, ...]:
        """All waits in progress, oldest first."""
        with self._lock:
            return tuple(self._waits.values())

    def oldest(self) -> Wait | None:
        """The wait that lasts longest, or None."""
        with self._lock:
            return next(iter(self._waits.values()), None)


WAITS = WaitRegistry()


@contextmanager
def waiting(what: str, subject: str, timeout_s: float) -> Iterator[None]:
    """Registers a wait of async code and ends it with TimeoutError after `timeout_s`; the message names both.

    A TimeoutError that the body raises by itself (a nested wait, a socket) passes through as it is.
    """
    with WAITS.register(what, subject, timeout_s):
        with anyio.move_on_after(timeout_s) as scope:
            yield
        if scope.cancelled_caught:
            raise TimeoutError(f"no {what} from {subject} after {timeout_s:g} s")


def format_waits(waits: Sequence[Wait] | None = None, *, waiter: str = "driver", now: float | None = None) -> str:
    """One line per wait, oldest first: `driver waits for: first generation from engine-0, 12.3 s of 600 s`."""
    if waits is None:
        waits = WAITS.snapshot()
    if now is None:
        now = time.monotonic()
    if not waits:
        return f"{waiter} waits for nothing outside itself"
    return "\n".join(f"{waiter} waits for: {wait.describe(now)}" for wait in waits)
