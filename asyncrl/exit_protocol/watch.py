"""The thread that carries out a rank's exit policy."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

from asyncrl.exit_protocol.beacon import watch_rank_zero
from asyncrl.exit_protocol.policy import ExitPolicy, Order
from asyncrl.host.proc import kill_hosts
from asyncrl.observability.waits import WAITS

BEACON_RETRY_S = 0.2
"""Interval at which a rank looks for rank 0's beacon until it finds it."""

_Handler = Callable[[int, FrameType | None], object] | int | None


class ExitWatch:
    """The thread that receives signals, watches rank 0, keeps the deadline, and leaves by force."""

    def __init__(
        self,
        policy: ExitPolicy,
        who: str,
        signals: tuple[signal.Signals, ...],
        beacon: str | None = None,
        tell: Callable[[str], None] = lambda answer: None,
    ) -> None:
        """`who` names the rank in messages; `beacon` is the name of rank 0's beacon, for ranks that watch it.

        `tell` gets the policy's answer to a signal until `disarm`. The watch's thread calls it; it must not wait.
        """
        self.policy = policy
        self._tell = tell
        self.orders, self._ordered = socket.socketpair()
        """Becomes readable when the event loop is to stop. (A socket, so that the thread never waits for the loop.)"""
        self._who = who
        self._signals = signals
        self._beacon = beacon
        self._signalled, self._wakeup = socket.socketpair()
        self._standing, self._stood = socket.socketpair()
        """Stop signals that were obeyed. Nobody reads them: they stand until the process ends."""
        self._ends = (self.orders, self._ordered, self._signalled, self._wakeup, self._standing, self._stood)
        for end in self._ends:
            end.setblocking(False)
        self._handlers: dict[signal.Signals, _Handler] = {}
        self._previous_wakeup = -1
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="exit-watch", daemon=True)

    def arm(self) -> None:
        """Takes over the signals and starts the thread. Call it in the main thread.

        On rank 0, call it inside the event loop: uvloop takes the wakeup descriptor when it starts.
        """
        for signum in self._signals:
            self._handlers[signum] = signal.signal(signum, _ignored)
            signal.siginterrupt(signum, False)  # the kernel restarts system calls of collectives
        self._previous_wakeup = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._thread.start()

    def disarm(self, keep_deadline: bool) -> None:
        """Gives the wakeup descriptor back to the event loop and restores the signal handlers.

        With `keep_deadline` the process ends soon, so the thread keeps handling signals and the deadline. When the
        interpreter no longer runs the thread, the kernel keeps the deadline.
        """
        signal.set_wakeup_fd(self._previous_wakeup, warn_on_full_buffer=self._previous_wakeup < 0)
        self._tell = lambda answer: None
        for signum, handler in self._handlers.items():
            signal.signal(signum, self._forward if keep_deadline else handler)
        if keep_deadline:
            atexit.register(self._leave_the_rest_to_the_kernel)
        else:
            self._closed = True
            self.wake()
            self._thread.join()
            for end in self._ends:
                end.close()

    @property
    def stop_signals(self) -> tuple[int, int]:
        """Descriptors of sockets in which stop signals stand: of those that nobody has read, and of those obeyed."""
        return self._signalled.fileno(), self._standing.fileno()

    def wake(self) -> None:
        """Makes the thread look at the policy again."""
        with contextlib.suppress(BlockingIOError):  # the buffer is full, so the thread will wake anyway
            self._wakeup.send(b"\0")

    def _forward(self, signum: int, frame: FrameType | None) -> None:
        """Replaces the wakeup descriptor: a Python handler, which runs between bytecodes of the main thread."""
        with contextlib.suppress(BlockingIOError):
            self._wakeup.send(bytes([signum]))

    def _leave_the_rest_to_the_kernel(self) -> None:
        """Sets a SIGALRM at the deadline: during destructors, daemon threads no longer get the GIL."""
        if self.policy.leave_by is not None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(self.policy.leave_by - time.monotonic(), 0.001))

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._signalled, select.POLLIN)
        rank_zero = None
        while not self._closed:
            if self._beacon is not None and rank_zero is None:
                rank_zero = watch_rank_zero(self._beacon)
                if rank_zero is not None:
                    poll.register(rank_zero, select.POLLIN)
                    self.policy.on_rank_zero_seen()
            ready = {fd for fd, _ in poll.poll(self._timeout_ms(rank_zero))}
            now = time.monotonic()
            if rank_zero is not None and rank_zero in ready:
                poll.unregister(rank_zero)
                self._beacon = None
                self.policy.on_rank_zero_gone(now)
            if self._signalled.fileno() in ready:
                for signum in self._signalled.recv(4096):
                    self._obey(self.policy.on_signal(signum, now), signum)
            if self.policy.leave_by is not None and now >= self.policy.leave_by:
                self._leave()

    def _timeout_ms(self, rank_zero: int | None) -> float | None:
        timeouts = []
        if self._beacon is not None and rank_zero is None:
            timeouts.append(BEACON_RETRY_S)
        if self.policy.leave_by is not None:
            timeouts.append(max(self.policy.leave_by - time.monotonic(), 0.0))
        return 1000 * min(timeouts) + 1 if timeouts else None

    def _obey(self, order: Order | None, signum: int) -> None:
        if order is Order.LEAVE:
            self._leave()
        elif order is not None:
            self._tell(self.policy.answer)
            if order is Order.STOP_NOW:
                self._stood.send(bytes([signum]))
                self._ordered.send(b"\0")

    def _leave(self) -> None:
        """Leaves by force; says why, and what the rank was waiting for.

        Its host is killed first: one that stands still would end nothing.
        """
        kill_hosts()
        now = time.monotonic()
        waits = "; ".join(wait.describe(now) for wait in WAITS.snapshot() if math.isfinite(wait.deadline_s))
        waited = f" (waiting for: {waits})" if waits else ""
        _say(f"asyncrl: {self._who} leaves by force: {self.policy.reason}{waited}")
        os._exit(self.policy.exit_code)


def _ignored(signum: int, frame: FrameType | None) -> None:
    """Replaces the default action of a signal; the thread learns of the signal from the wakeup descriptor."""


def _say(line: str) -> None:
    """Writes one line to stderr, unless stderr is closed or its reader is not reading."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            shown_cursor = b"\033[?25h" if os.isatty(2) else b""  # a live display may have hidden it
            os.write(2, shown_cursor + line.encode() + b"\n")
