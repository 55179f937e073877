"""The trainer thread: the one thread of rank 0 that makes every torch.distributed and Megatron call.

Invariants
- Calls run one after another in the order of `submit`, all in the same thread: NCCL, the CUDA device and the CPU shim
  are bound to it.
- A caller that is cancelled or times out does not disturb the thread. A call that has not begun is skipped. A call that
  runs goes on to its end; its result is dropped and its exception is logged.
- The thread is a daemon and is never joined without a bound, so a collective that hangs cannot hold the process.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import anyio
import structlog

from asyncrl.observability.waits import waiting

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TrainerThreadStatistics:
    """The present state of the thread."""

    running: str | None
    """The call in progress, in words; None while the thread waits."""
    running_since: float | None
    """time.monotonic() at its start."""
    queued: int
    """Calls that have not begun."""


class ThreadCall(Generic[T]):
    """One submitted call; belongs to the event loop that submitted it."""

    def __init__(self, what: str, call: Callable[[], T], on_done: Callable[[ThreadCall[T]], None] | None) -> None:
        self.what = what
        self.done = False
        self.exception: BaseException | None = None
        self.abandoned = False
        self._call = call
        self._value: T | None = None
        self._finished = anyio.Event()
        self._on_done = on_done
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()

    def abandon(self) -> None:
        """The caller no longer waits for the result: a call that has not begun will be skipped."""
        with self._lock:
            self.abandoned = True
        if self.done and self.exception is not None:
            _log_abandoned(self.what, self.exception)

    async def wait(self) -> None:
        """Returns once the call has ended; one that is skipped never ends."""
        await self._finished.wait()

    def result(self) -> T:
        """Returns the value or raises the call's exception. Only once `done`."""
        if self.exception is not None:
            raise self.exception
        return cast(T, self._value)

    def run(self) -> None:
        """Makes the call, unless it was abandoned. In the trainer thread."""
        with self._lock:
            if self.abandoned:
                return
        value: T | None = None
        exception: BaseException | None = None
        try:
            value = self._call()
        except BaseException as error:  # of any kind: it belongs to the caller, not to the thread
            exception = error
        try:
            self._loop.call_soon_threadsafe(self._finish, value, exception)
        except RuntimeError:  # the loop was closed meanwhile: no caller is left
            if exception is not None:
                _log_abandoned(self.what, exception)

    def _finish(self, value: T | None, exception: BaseException | None) -> None:
        self._value, self.exception, self.done = value, exception, True
        self._finished.set()
        if self.abandoned and exception is not None:
            _log_abandoned(self.what, exception)
        if self._on_done is not None:
            self._on_done(self)


class TrainerThread:
    """A daemon thread with a queue; see the module's invariants."""

    def __init__(self, name: str = "trainer") -> None:
        self._queue: queue.SimpleQueue[ThreadCall[Any] | None] = queue.SimpleQueue()
        self._running: tuple[str, float] | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, call: Callable[[], T], *, what: str, on_done: Callable[[ThreadCall[T]], None] | None = None
    ) -> ThreadCall[T]:
        """Queues `call`. When it has ended, `on_done` is called with the returned object, in the event loop."""
        job = ThreadCall(what, call, on_done)
        self._queue.put(job)
        return job

    async def call(self, function: Callable[..., T], *args: Any, what: str, timeout_s: float) -> T:
        """Runs `function(*args)` in the thread and returns its value or raises its exception.

        Raises TimeoutError after `timeout_s`, the time in the queue included.
        """
        job = self.submit(lambda: function(*args), what=what)
        try:
            with waiting(what, "trainer thread", timeout_s):
                await job.wait()
        except BaseException:
            job.abandon()
            raise
        return job.result()

    def statistics(self) -> TrainerThreadStatistics:
        """What the thread does right now."""
        running = self._running
        return TrainerThreadStatistics(
            running=running[0] if running else None,
            running_since=running[1] if running else None,
            queued=self._queue.qsize(),
        )

    def stack(self, frames: int = 6) -> str:
        """The innermost frames of the thread, for the report of a hang."""
        return thread_stack(self._thread, frames)

    def close(self) -> None:
        """Ends the thread after the queued calls, without waiting for it."""
        self._queue.put(None)

    def _main(self) -> None:
        while (job := self._queue.get()) is not None:
            self._running = (job.what, time.monotonic())
            job.run()
            self._running = None
            del job  # else it would keep its batch alive until the next call


def thread_stack(thread: threading.Thread, frames: int) -> str:
    """The innermost `frames` frames of a thread as text; empty where it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame)[-frames:])


def _log_abandoned(what: str, exception: BaseException) -> None:
    _log.error("an abandoned trainer call failed", call=what, error=f"{type(exception).__name__}: {exception}")
