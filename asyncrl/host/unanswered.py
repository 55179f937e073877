"""Stop signals that rank 0 does not answer: the host ends a rank 0 that cannot end itself.

Code that holds the interpreter's lock for ever (a reward with reward.workers = 0, a C extension) stops every thread of
rank 0, the one that keeps the deadline of a stop as well. The kernel runs the C handler of a signal all the same, which
writes the signal into a socket. The host has that socket too. It looks, without reading, whether a stop signal stands
in it: one that rank 0 has read stands in a second socket from then on. So a signal that stands for longer than rank 0's
grace is one after which rank 0 did not end, whatever holds it.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop the job now."""


@dataclass(frozen=True, slots=True)
class StopSignals:
    """Where rank 0's stop signals stand, and how long they may."""

    sockets: tuple[int, ...]
    """Descriptors: of signals that nobody has read, and of those that were read."""
    patience_s: float

    def arguments(self) -> tuple[str, ...]:
        """As arguments of the host's process."""
        return (str(self.patience_s), *map(str, self.sockets))


NO_STOP_SIGNALS = StopSignals((), 0.0)
"""For a rank 0 that nobody needs to end."""


@dataclass(slots=True)
class Patience:
    """When rank 0 is to be ended. Pure: callers pass the time in."""

    patience_s: float
    since: float | None = None
    """When a stop signal was first seen to stand."""

    def exhausted(self, standing: bool, now: float) -> bool:
        """Whether a stop signal has stood since longer than that."""
        if not standing:
            self.since = None
        elif self.since is None:
            self.since = now
        return self.since is not None and now - self.since >= self.patience_s


class UnansweredStops:
    """The host's look at the stop signals of its rank 0."""

    def __init__(self, rank_zero: int, arguments: Sequence[str]) -> None:
        """`arguments` are those of `StopSignals`."""
        self._rank_zero = rank_zero
        self._patience = Patience(float(arguments[0]))
        self._sockets = [socket.socket(fileno=int(fd)) for fd in arguments[1:]]
        for looked_at in self._sockets:
            looked_at.set_inheritable(False)

    def look(self, now: float) -> None:
        """Kills rank 0 when its patience is exhausted."""
        if self._patience.exhausted(any(map(_stands, self._sockets)), now):
            self._sockets.clear()
            _tell(
                self._rank_zero,
                f"asyncrl: rank 0 is ended by force: it still runs {self._patience.patience_s:g} s after a stop "
                "signal, held up by code that holds the interpreter's lock (a reward with reward.workers = 0?)\n",
            )
            with suppress(ProcessLookupError):
                os.kill(self._rank_zero, signal.SIGKILL)


def _stands(looked_at: socket.socket) -> bool:
    try:
        standing = looked_at.recv(4096, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return False
    return any(signum in STOP_SIGNALS for signum in standing)


def _tell(rank_zero: int, line: str) -> None:
    """Writes a line to the stderr of rank 0, unless nobody reads it."""
    with suppress(OSError):
        stderr = os.open(f"/proc/{rank_zero}/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            os.write(stderr, line.encode())
        finally:
            os.close(stderr)
