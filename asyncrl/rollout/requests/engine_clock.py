"""Deadlines of requests, whose clock stands still while engines are paused.

Engines generate nothing while they take new weights, so the deadline of a request counts only the time in which engines
could answer. `PauseClock` is the arithmetic, `EngineClock` has the waits that go by it.

Invariants
- A wait of T seconds ends when engines could answer for T seconds since its start: never in a pause, and never later.
- Pauses do not add up: a pause that begins within another one is the same pause.
- The registry of waits (`observability/waits.py`) lists each wait, and the pause. A wait does not age in a pause.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from types import TracebackType

import anyio

from asyncrl.observability.waits import WAITS, Wait
from asyncrl.tasks import Changes


@dataclass(frozen=True, slots=True)
class PauseClock:
    """Time without the pauses. Pure: `now` is any monotonic time in seconds that never goes back."""

    stood_still_s: float = 0.0
    """Seconds in all pauses that have ended."""
    paused_since: float | None = None

    def time(self, now: float) -> float:
        """The reading of this clock."""
        return (now if self.paused_since is None else self.paused_since) - self.stood_still_s

    def pause(self, now: float) -> PauseClock:
        """The clock with a pause that begins at `now`, unless it is paused."""
        return self if self.paused_since is not None else replace(self, paused_since=now)

    def resume(self, now: float) -> PauseClock:
        """The clock without a pause from `now` on."""
        return self if self.paused_since is None else PauseClock(self.stood_still_s + now - self.paused_since)

    def when(self, time: float) -> float:
        """The `now` at which this clock will show `time` if no further pause comes; infinite during a pause."""
        return math.inf if self.paused_since is not None else time + self.stood_still_s


class EngineClock:
    """Waits that end by the clock of the engines; one for each group of engines that is paused together."""

    def __init__(self, expected_pause_s: float = math.inf) -> None:
        """`expected_pause_s` is the deadline that the registry of waits lists for a pause."""
        self._expected_pause_s = expected_pause_s
        self._clock = PauseClock()
        self._waits: dict[_ClockWait, None] = {}
        self._listed = False
        self._resumed = Changes()
        self.pauses = 0
        """Pauses that have begun."""

    @property
    def paused(self) -> bool:
        """Whether engines generate nothing now."""
        return self._clock.paused_since is not None

    @property
    def stood_still_s(self) -> float:
        """Seconds in all pauses, including the present one."""
        now = time.monotonic()
        return now - self._clock.time(now)

    def pause(self) -> None:
        """Engines generate nothing from now on."""
        if not self.paused:
            self.pauses += 1
            self._set(self._clock.pause(time.monotonic()))

    def resume(self) -> None:
        """Engines generate again."""
        self._set(self._clock.resume(time.monotonic()))
        self._resumed.notify()

    async def running(self) -> None:
        """Returns as soon as engines are not paused."""
        while self.paused:
            await self._resumed.wait()

    def waiting(self, what: str, subject: str, timeout_s: float) -> AbstractContextManager[None]:
        """Like `observability.waits.waiting`, by this clock. Raises TimeoutError."""
        return _ClockWait(self, what, subject, timeout_s)

    async def sleep(self, seconds: float, what: str, subject: str) -> None:
        """Returns when the clock has gone on by `seconds`; `what` and `subject` name the wait."""
        with suppress(TimeoutError), self.waiting(what, subject, seconds):
            await anyio.sleep_forever()

    def waits(self) -> Iterator[Wait]:
        """The waits in progress, and the pause; may be called from any thread."""
        clock, now = self._clock, time.monotonic()
        if clock.paused_since is not None:
            yield Wait("end of the pause", "engines", clock.paused_since, self._expected_pause_s)
        for wait in self._waits.copy():
            counted_s = clock.time(now) - (wait.end - wait.timeout_s)
            yield Wait(wait.what, wait.subject, wait.since, wait.timeout_s, now - wait.since - counted_s)

    def _set(self, clock: PauseClock) -> None:
        self._clock = clock
        for wait in self._waits:
            wait.scope.deadline = clock.when(wait.end)
        self._list()

    def _list(self) -> None:
        """Is in the registry only while there is a wait or a pause."""
        listed = bool(self._waits) or self.paused
        if listed != self._listed:
            self._listed = listed
            (WAITS.add if listed else WAITS.remove)(self)


class _ClockWait:
    """One wait. Every request passes through one, so this is no generator and has no registry entry of its own."""

    __slots__ = ("_clock", "end", "scope", "since", "subject", "timeout_s", "what")

    def __init__(self, clock: EngineClock, what: str, subject: str, timeout_s: float) -> None:
        self._clock, self.what, self.subject, self.timeout_s = clock, what, subject, timeout_s

    def __enter__(self) -> None:
        clock = self._clock
        self.since = time.monotonic()
        self.end = clock._clock.time(self.since) + self.timeout_s
        """The reading of the clock at the deadline."""
        self.scope = anyio.CancelScope(deadline=clock._clock.when(self.end))
        self.scope.__enter__()
        clock._waits[self] = None
        if not clock._listed:
            clock._list()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool | None:
        clock = self._clock
        del clock._waits[self]
        if not clock._waits:
            clock._list()
        swallowed = self.scope.__exit__(kind, error, at)
        if self.scope.cancelled_caught:
            raise TimeoutError(f"no {self.what} from {self.subject} after {self.timeout_s:g} s") from None
        return swallowed
