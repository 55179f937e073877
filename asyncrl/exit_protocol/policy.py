"""What each kind of rank does at signals, at deadlines and at the death of rank 0.

Pure state machines: callers pass the time in, as seconds of one monotonic clock.
"""

from __future__ import annotations

import signal
from enum import Enum
from typing import Protocol

from asyncrl.host.unanswered import STOP_SIGNALS

GRACEFUL_SIGNAL = signal.SIGUSR1
"""Signal that stops the job after the step in progress."""

REPEAT_S = 0.5
"""A second signal within this time counts as an echo of the first: schedulers signal both the agent and its ranks."""

RANK_MARGIN_S = 1.0
"""Ranks >= 1 give rank 0 its grace and this much more."""

GONE_GRACE_S = 2.0
"""Time that ranks >= 1 have for an exit of their own once rank 0 is gone."""

HOST_MARGIN_S = 1.5
"""The host ends rank 0 so much later than rank 0 itself should: it looks every half second."""

UNSIGNALLED_GRACES = 5.0
"""Shutdown without a signal may take this many times `stop_grace_s`: torchrun is not counting, and the run still has
results to write."""


class Order(Enum):
    """An order of a policy to the watch."""

    STOP_NOW = "stop now"
    FINISH = "leave after the step in progress"
    LEAVE = "leave by force"


class StopRequest:
    """A request that the loop leave after the step in progress. The loop looks at `requested` between steps."""

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        """Makes the request; it cannot be withdrawn."""
        self.requested = True


class ExitPolicy(Protocol):
    """Decides what a rank does; the watch carries it out."""

    exit_code: int
    """Exit status if the rank leaves by force."""
    leave_by: float | None
    """Time at which the rank leaves by force; None if there is no such deadline."""
    reason: str
    """Why the rank leaves by force."""
    answer: str
    """Text for the person who sent the signal behind the latest order."""

    def on_signal(self, signum: int, now: float) -> Order | None:
        """Reacts to a signal; returns the order that follows from it, if any."""

    def on_rank_zero_seen(self) -> None:
        """Notes that rank 0 has appeared."""

    def on_rank_zero_gone(self, now: float) -> None:
        """Reacts to the end of rank 0's process."""


class RankZeroPolicy:
    """The policy of rank 0, which leads each stop."""

    def __init__(self, stop_grace_s: float) -> None:
        self.stop_grace_s = stop_grace_s
        self.exit_code = 0
        self.leave_by: float | None = None
        self.reason = ""
        self.answer = ""
        self.stopped_by: signal.Signals | None = None
        """The first stop signal; None if there was none."""
        self.stop = StopRequest()
        """Request for a graceful stop."""
        self._since = 0.0

    def on_signal(self, signum: int, now: float) -> Order | None:
        """Orders a stop at the first stop signal, a forced exit at the second, a graceful stop at SIGUSR1."""
        if signum == GRACEFUL_SIGNAL:
            if self.stop.requested or self.stopped_by is not None:
                return None
            self.stop.request()
            self.answer = "asked to stop: the step in progress is the last"
            return Order.FINISH
        if signum not in STOP_SIGNALS:
            return None
        name = signal.Signals(signum).name
        if self.stopped_by is None:
            self.stopped_by, self._since = signal.Signals(signum), now
            self.exit_code = 128 + signum
            self.reason = f"stopping after {name} took longer than {self.stop_grace_s:g} s"
            self.leave_by = _earlier(self.leave_by, now + self.stop_grace_s)
            self.answer = f"{name}: stopping, within {self.leave_by - now:.3g} s; a second signal leaves by force"
            return Order.STOP_NOW
        if now - self._since < REPEAT_S:
            return None
        self.reason = f"{name} while stopping"
        return Order.LEAVE

    def on_rank_zero_seen(self) -> None:
        """Never called."""
        raise AssertionError("rank 0 does not watch itself")

    def on_rank_zero_gone(self, now: float) -> None:
        """Never called."""
        raise AssertionError("rank 0 does not watch itself")

    def expect_exit(self, exit_code: int, now: float, error: str = "") -> None:
        """Starts the deadline of the next stage of the shutdown: disposal, summary, exit of the interpreter.

        Each stage has its own time. After a stop signal, all stages share the grace that the signal started.
        """
        if self.stopped_by is None:
            self.exit_code = exit_code
            limit_s = UNSIGNALLED_GRACES * self.stop_grace_s
            self.reason = f"shutdown took longer than {limit_s:g} s" + (f" after: {error}" if error else "")
            self.leave_by = now + limit_s


class RankPolicy:
    """The policy of ranks >= 1, which follow rank 0."""

    def __init__(self, stop_grace_s: float, watches_rank_zero: bool) -> None:
        self.stop_grace_s = stop_grace_s
        self.exit_code = 1
        self.leave_by: float | None = None
        self.reason = ""
        self.answer = ""
        self._unseen = watches_rank_zero
        """True until rank 0 appears. While rank 0 starts, a signal or an error ends it at once."""
        self._done = False

    def on_signal(self, signum: int, now: float) -> Order | None:
        """Gives rank 0 the time to lead the stop; gives no order."""
        if signum in STOP_SIGNALS and not self._done:
            self.exit_code = 128 + signum
            grace_s = GONE_GRACE_S if self._unseen else self.stop_grace_s + RANK_MARGIN_S
            self._leave_by(now + grace_s, f"rank 0 did not end the job after {signal.Signals(signum).name}")
        return None

    def on_rank_zero_seen(self) -> None:
        """From now on, a stop signal gives rank 0 its whole grace."""
        self._unseen = False

    def on_rank_zero_gone(self, now: float) -> None:
        """Starts the short deadline for an exit of the rank's own."""
        if not self._done:
            self._leave_by(now + GONE_GRACE_S, "rank 0 is gone")

    def expect_exit(self, exit_code: int, now: float) -> None:
        """The rank has done its work: it has one grace to exit, and no longer follows rank 0."""
        self._done, self.exit_code = True, exit_code
        self.leave_by, self.reason = now + self.stop_grace_s, f"shutdown took longer than {self.stop_grace_s:g} s"

    def _leave_by(self, when: float, reason: str) -> None:
        if self.leave_by is None or when < self.leave_by:
            self.leave_by, self.reason = when, reason


def _earlier(first: float | None, second: float) -> float:
    return second if first is None else min(first, second)
