"""Who waits for what, since when: the registry behind every deadline of the job.

Invariant: a wait on anything outside this process goes through `waiting`, so it has a deadline and
can be named while it lasts. `WAITS.snapshot()` may be called from any thread.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
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
        with self._lock:
            return tuple(self._waits.values())


WAITS = WaitRegistry()


@contextmanager
def waiting(what: str, subject: str, timeout_s: float) -> Iterator[None]:
    """Registers a wait of async code and ends it with TimeoutError after `timeout_s`; the message names both."""
    with WAITS.register(what, subject, timeout_s):
        try:
            with anyio.fail_after(timeout_s):
                yield
        except TimeoutError as error:
            if error.args:
                raise
            raise TimeoutError(f"no {what} from {subject} after {timeout_s:g} s") from error
