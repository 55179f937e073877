"""Names the cause of a hang: long waits, a blocked event loop, and, on SIGUSR2, all stacks and waits at once.

Invariants
- A wait is reported once, when half of its deadline has passed. Short waits are not reported.
- A block of the event loop is reported twice: with the function that blocks it, while it lasts, and when it is over.
- A process that stood still as a whole (SIGSTOP, a suspended machine) is not reported as a blocked loop.
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
"""Interval at which the event loop notes that it turns."""
_LOOK_S = 0.2
"""Interval at which the monitor's thread looks at that note."""
_STARVED_TIMES = 5.0
"""A late loop that runs no function, or imports a module, is reported only after this many times the threshold. Below
that, it usually loads what a start needs, here or in another thread, and the user cannot change that."""


class OverdueWaits:
    """Decides which waits to report: each wait once, after half of its deadline and at least `min_age_s`."""

    def __init__(self, min_age_s: float = 5.0) -> None:
        self._min_age_s = min_age_s
        self._reported: set[Wait] = set()

    def newly_overdue(self, waits: Sequence[Wait], now: float) -> tuple[Wait, ...]:
        """Returns the waits to report at monotonic time `now`; forgets waits that have ended."""
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
    """Logs a warning and emits an event for each wait that has used half of its deadline. Runs until cancelled."""
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
    """A line of code in a function."""

    function: str
    """Qualified name."""
    file: str
    """Path."""
    line: int
    """From 1."""

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


_LIBRARIES = tuple(
    {*(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages()}
)
_LOOP_FILES = ("/selectors.py", "/asyncio/runners.py", "/asyncio/base_events.py")
"""Files of the event loop: the stack of a running callback ends there, and an idle loop waits there. (uvloop has no
Python frames.)"""


def _is_library(place: CodePlace) -> bool:
    return place.file.startswith(("<frozen", *_LIBRARIES))


def blocking_place(frame: FrameType | None) -> CodePlace | None:
    """Returns the function that blocks a thread, given the thread's innermost frame; None if its event loop is idle.

    It is the innermost function outside the standard library and installed packages, because `json.loads` says less
    than its caller. If the stack is all library code, it is the innermost function.
    """
    stack: list[CodePlace] = []
    while frame is not None and not frame.f_code.co_filename.endswith(_LOOP_FILES):
        stack.append(CodePlace(frame.f_code.co_qualname, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return next((place for place in stack if not _is_library(place)), stack[0] if stack else None)


@dataclass(frozen=True, slots=True)
class LoopStatistics:
    """Delays of the event loop so far."""

    max_lag_s: float
    """Longest delay of one turn."""
    blocks: int
    """Number of times that one function blocked the loop for longer than the threshold."""


class LoopMonitor:
    """Watches the event loop that runs `run`, from its own thread, and names the function that blocks the loop."""

    def __init__(self, *, threshold_s: float = 1.0, events: EventLog | None = None) -> None:
        self._threshold_s = threshold_s
        self._events = events
        self._stop = threading.Event()
        self._beat = 0.0
        self._max_lag_s = 0.0
        self._blocks = 0

    def statistics(self) -> LoopStatistics:
        """Returns the delays since `run` began."""
        return LoopStatistics(self._max_lag_s, self._blocks)

    async def run(self) -> None:
        """Watches the loop until cancelled."""
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
            # This thread was late too, and the process used hardly any CPU time: the whole process stood still.
            if gap_s - _LOOK_S >= self._threshold_s and used_s < gap_s / 10:
                _log.warning(f"the process did not run for {gap_s:.1f} s: stopped, suspended, or starved of CPU")
                continue
            late_s = now - beat
            if reported_beat or late_s < self._threshold_s + _HEARTBEAT_S:
                continue
            place = blocking_place(sys._current_frames().get(loop_thread))
            importing = place is not None and place.function == "<module>"
            if (place is None or importing) and late_s < _STARVED_TIMES * self._threshold_s:
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
    """While entered, `signum` writes every thread's stack and the waits in progress to `stream`.

    C code writes the stacks, so they appear even if the main thread hangs; the waits follow once it runs again.
    `stream` needs a file descriptor. Only the main thread may enter this context.
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
