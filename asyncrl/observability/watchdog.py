"""Names what a job hangs on: long waits, a blocked event loop, and, on SIGUSR2, everything at once.

Invariants
- A wait is reported once, when half of its deadline has passed; short waits are left to end by themselves.
- A block of the event loop is reported once while it lasts, by the function that blocks, and once when it is over.
- A process that was stopped as a whole (SIGSTOP, a suspended machine) is told apart from a blocked loop.
"""

from __future__ import annotations

import faulthandler
import signal
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TextIO

import anyio
import structlog

from asyncrl.observability.events import EventLog, FaultSeen
from asyncrl.observability.waits import WAITS, Wait, WaitRegistry, format_waits

_log = structlog.get_logger("asyncrl.watchdog")

_HEARTBEAT_S = 0.1
_LOOK_S = 0.2
_STARVED_TIMES = 5.0
"""A loop that runs nothing itself is spoken of at so many times the threshold: below, it waits for a library that
another thread imports, as at every start, and nobody can do a thing about that."""


class OverdueWaits:
    """Decides which waits to report: each once, when it has used half of its deadline and at least `min_age_s`."""

    def __init__(self, min_age_s: float = 5.0) -> None:
        self._min_age_s = min_age_s
        self._reported: set[Wait] = set()

    def newly_overdue(self, waits: Sequence[Wait], now: float) -> tuple[Wait, ...]:
        """The waits to report at monotonic time `now`; forgets those that ended."""
        self._reported.intersection_update(waits)
        overdue = tuple(
            wait
            for wait in waits
            if wait not in self._reported and wait.age_s(now) >= max(self._min_age_s, wait.deadline_s / 2)
        )
        self._reported.update(overdue)
        return overdue


async def watch_stalls(
    registry: WaitRegistry = WAITS,
    *,
    events: EventLog | None = None,
    interval_s: float = 1.0,
    min_age_s: float = 5.0,
) -> None:
    """Logs a warning, and an event, for each wait that has used half of its deadline; runs until cancelled."""
    policy = OverdueWaits(min_age_s)
    while True:
        now = time.monotonic()
        for wait in policy.newly_overdue(registry.snapshot(), now):
            _log.warning(f"still waiting for {wait.describe(now)}")
            if events is not None:
                events.emit(FaultSeen(component=wait.subject, what=f"still waiting for {wait.describe(now)}"))
        await anyio.sleep(interval_s)


@dataclass(frozen=True, slots=True)
class CodePlace:
    """A function at a line."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


_LIBRARIES = tuple(
    {*(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages()}
)
_LOOP_FILES = ("/selectors.py", "/asyncio/runners.py", "/asyncio/base_events.py")
"""Where the stack of whatever a loop runs ends, and where an idle loop sits (uvloop itself has no Python frames)."""


def _is_library(place: CodePlace) -> bool:
    return place.file.startswith(("<frozen", *_LIBRARIES))


def blocking_place(frame: FrameType | None) -> CodePlace | None:
    """Which function holds a thread up, given its innermost frame; None where it sits idle in its event loop.

    That is the innermost function outside the standard library and installed packages, since `json.loads` says
    less than its caller; where all is library code, the innermost one.
    """
    stack: list[CodePlace] = []
    while frame is not None and not frame.f_code.co_filename.endswith(_LOOP_FILES):
        stack.append(CodePlace(frame.f_code.co_qualname, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return next((place for place in stack if not _is_library(place)), stack[0] if stack else None)


@dataclass(frozen=True, slots=True)
class LoopStatistics:
    """How well the event loop kept its pace."""

    max_lag_s: float
    """Longest delay of a turn that was due."""
    blocks: int
    """Times that it did not turn for longer than the threshold."""


class LoopMonitor:
    """Watches the event loop that runs `run`, from a thread of its own, and names the function that blocks it."""

    def __init__(self, *, threshold_s: float = 1.0, events: EventLog | None = None) -> None:
        self._threshold_s = threshold_s
        self._events = events
        self._stop = threading.Event()
        self._beat = 0.0
        self._max_lag_s = 0.0
        self._blocks = 0

    def statistics(self) -> LoopStatistics:
        return LoopStatistics(self._max_lag_s, self._blocks)

    async def run(self) -> None:
        """Runs until cancelled."""
        self._beat = time.monotonic()
        thread = threading.Thread(
            target=self._watch, args=(threading.get_ident(),), name="asyncrl-loop-monitor", daemon=True
        )
        thread.start()
        try:
            while True:
                await anyio.sleep(_HEARTBEAT_S)
                now = time.monotonic()
                self._max_lag_s = max(self._max_lag_s, now - self._beat - _HEARTBEAT_S)
                self._beat = now
        finally:
            self._stop.set()

    def _watch(self, loop_thread: int) -> None:
        reported_beat = 0.0
        looked, cpu_s = time.monotonic(), time.process_time()
        while not self._stop.wait(_LOOK_S):
            beat, now = self._beat, time.monotonic()
            gap_s, looked = now - looked, now
            used_s, cpu_s = time.process_time() - cpu_s, time.process_time()
            if reported_beat and beat != reported_beat:
                _log.warning(f"the event loop turns again after {beat - reported_beat:.1f} s")
                reported_beat = 0.0
            # This thread was held up too, and hardly any CPU time went by: the whole process stood still, not the loop.
            if gap_s - _LOOK_S >= self._threshold_s and used_s < gap_s / 10:
                _log.warning(f"the process did not run for {gap_s:.1f} s: stopped, suspended, or starved of CPU")
                continue
            late_s = now - beat
            if reported_beat or late_s < self._threshold_s + _HEARTBEAT_S:
                continue
            place = blocking_place(sys._current_frames().get(loop_thread))
            if place is None and late_s < _STARVED_TIMES * self._threshold_s:
                continue
            reported_beat = beat
            if place is None:
                _log.warning(
                    f"the event loop did not turn for {late_s:.1f} s, yet runs nothing: starved by other threads"
                )
                continue
            self._blocks += 1
            what = f"blocked for {late_s:.1f} s by {place}"
            _log.warning(f"the event loop is {what}; give that work to a thread or a process")
            if self._events is not None:
                self._events.emit(FaultSeen(component="event loop", what=what))


@contextmanager
def dump_on_signal(stream: TextIO, signum: int = signal.SIGUSR2) -> Iterator[None]:
    """On `signum`, writes every thread's stack and the waits in progress to `stream` (which needs a file descriptor).

    Stacks come from C and so appear even when the main thread hangs; the waits follow as soon as it runs again.
    Only the main thread may enter this.
    """

    def dump(_signum: int, _frame: FrameType | None) -> None:
        stream.write(format_waits() + "\n")
        stream.flush()

    before = signal.signal(signum, dump)
    faulthandler.register(signum, file=stream, all_threads=True, chain=True)
    try:
        yield
    finally:
        faulthandler.unregister(signum)
        signal.signal(signum, before)
