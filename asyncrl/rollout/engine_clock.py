"""Deadlines of requests, whose clock stands still while engines are paused.

Engines that take new weights generate nothing, as long as that lasts. A request is not to blame for it: its deadline
counts the time in which engines could answer. `PauseClock` is the arithmetic, `EngineClock` the scopes that keep it.

Invariants
- A wait of T seconds ends when engines could answer for T seconds since its start: never in a pause, and never later.
- Pauses do not add up: a second one that begins within the first is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import anyio

from asyncrl.observability.waits import WAITS


@dataclass(frozen=True, slots=True)
class PauseClock:
    """Time without the pauses. Pure: `now` is any monotonic time in seconds that never goes back."""

    stood_still_s: float = 0.0
    """Over all pauses that have ended."""
    paused_since: float | None = None

    def time(self, now: float) -> float:
        """What this clock shows."""
        return (now if self.paused_since is None else self.paused_since) - self.stood_still_s

    def pause(self, now: float) -> PauseClock:
        return self if self.paused_since is not None else replace(self, paused_since=now)

    def resume(self, now: float) -> PauseClock:
        return self if self.paused_since is None else PauseClock(self.stood_still_s + now - self.paused_since)

    def when(self, time: float) -> float:
        """The `now` at which this clock shows `time`, unless there are more pauses; infinite during one."""
        return math.inf if self.paused_since is not None else time + self.stood_still_s


class EngineClock:
    """Waits that end by the clock of the engines; one for each group of engines that is paused together."""

    def __init__(self) -> None:
        self._clock = PauseClock()
        self._ends: dict[anyio.CancelScope, float] = {}
        """By scope of a wait in progress: what the clock shows at its end."""
        self._resumed = anyio.Event()
        self._resumed.set()
        self.pauses = 0
        """That have begun."""

    @property
    def paused(self) -> bool:
        return self._clock.paused_since is not None

    @property
    def stood_still_s(self) -> float:
        """Seconds over all pauses, the present one included."""
        now = anyio.current_time()
        return now - self._clock.time(now)

    def pause(self) -> None:
        """Engines generate nothing from now on."""
        if not self.paused:
            self.pauses += 1
            self._resumed = anyio.Event()
            self._set(self._clock.pause(anyio.current_time()))

    def resume(self) -> None:
        """Engines generate again."""
        self._set(self._clock.resume(anyio.current_time()))
        self._resumed.set()

    async def running(self) -> None:
        """Returns at once, or when the present pause has ended."""
        await self._resumed.wait()

    @contextmanager
    def waiting(self, what: str, subject: str, timeout_s: float) -> Iterator[None]:
        """As `observability.waits.waiting`, by this clock. Raises TimeoutError."""
        with WAITS.register(what, subject, timeout_s):
            with self._ending(timeout_s) as scope:
                yield
            if scope.cancelled_caught:
                raise TimeoutError(f"no {what} from {subject} after {timeout_s:g} s")

    async def sleep(self, seconds: float) -> None:
        """Until the clock has gone on by so much."""
        with self._ending(seconds):
            await anyio.sleep_forever()

    @contextmanager
    def _ending(self, timeout_s: float) -> Iterator[anyio.CancelScope]:
        end = self._clock.time(anyio.current_time()) + timeout_s
        with anyio.CancelScope(deadline=self._clock.when(end)) as scope:
            self._ends[scope] = end
            try:
                yield scope
            finally:
                del self._ends[scope]

    def _set(self, clock: PauseClock) -> None:
        self._clock = clock
        for scope, end in self._ends.items():
            scope.deadline = clock.when(end)
