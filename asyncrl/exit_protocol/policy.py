"""What each kind of rank does about signals, time and the death of rank 0: pure state machines, time is passed in."""

from __future__ import annotations

import signal
from enum import Enum
from typing import Protocol

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACEFUL_SIGNAL = signal.SIGUSR1

REPEAT_S = 0.5
"""A second signal within this time is an echo of the first: schedulers signal the agent and its ranks alike."""

RANK_MARGIN_S = 1.0
"""Ranks >= 1 allow rank 0 its grace and this much more."""

GONE_GRACE_S = 2.0
"""How long ranks >= 1 may take for an end of their own once rank 0 is gone."""


UNHURRIED = 5.0
"""An end without a signal may take so many graces: no agent counts its seconds, and it has something left to say."""


class Order(Enum):
    """What a policy wants done."""

    STOP_NOW = "stop now"
    FINISH = "leave after the step in progress"
    LEAVE = "leave by force"


class StopRequest:
    """A wish that the loop leave after the step in progress; it looks at `requested` between steps."""

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        self.requested = True


class Policy(Protocol):
    """What the watch asks; times are seconds of one monotonic clock."""

    exit_code: int
    """Status for leaving by force."""
    leave_by: float | None
    """When to leave by force."""
    reason: str
    answer: str
    """What to tell the person who sent the signal that the latest order came from."""

    def on_signal(self, signum: int, now: float) -> Order | None: ...
    def on_rank_zero_seen(self) -> None: ...
    def on_rank_zero_gone(self, now: float) -> None: ...


class RankZeroPolicy:
    """Rank 0."""

    def __init__(self, stop_grace_s: float) -> None:
        self.stop_grace_s = stop_grace_s
        self.exit_code = 0
        self.leave_by: float | None = None
        self.reason = ""
        self.answer = ""
        self.stopped_by: signal.Signals | None = None
        self.stop = StopRequest()
        self._since = 0.0

    def on_signal(self, signum: int, now: float) -> Order | None:
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
            self.answer = f"{name}: stopping, for {self.leave_by - now:.3g} s at most; once more leaves by force"
            return Order.STOP_NOW
        if now - self._since < REPEAT_S:
            return None
        self.reason = f"{name} while stopping"
        return Order.LEAVE

    def on_rank_zero_seen(self) -> None:
        raise AssertionError("rank 0 does not watch itself")

    def on_rank_zero_gone(self, now: float) -> None:
        raise AssertionError("rank 0 does not watch itself")

    def expect_exit(self, exit_code: int, now: float, error: str = "") -> None:
        """Each stage of an end (disposal, summary, interpreter) has its own time; a signal gives one grace for all."""
        if self.stopped_by is None:
            self.exit_code = exit_code
            self.reason = f"the end took longer than {UNHURRIED * self.stop_grace_s:g} s"
            if error:
                self.reason += f" after: {error}"
            self.leave_by = now + UNHURRIED * self.stop_grace_s


class RankPolicy:
    """Ranks >= 1."""

    def __init__(self, stop_grace_s: float, watches_rank_zero: bool) -> None:
        self.stop_grace_s = stop_grace_s
        self.exit_code = 1
        self.leave_by: float | None = None
        self.reason = ""
        self.answer = ""
        self._unseen = watches_rank_zero
        """Rank 0 has not shown itself yet: while it starts, its signals and errors end it at once."""
        self._done = False

    def on_signal(self, signum: int, now: float) -> Order | None:
        if signum in STOP_SIGNALS and not self._done:
            self.exit_code = 128 + signum
            grace_s = GONE_GRACE_S if self._unseen else self.stop_grace_s + RANK_MARGIN_S
            self._leave_by(now + grace_s, f"no end came from rank 0 after {signal.Signals(signum).name}")
        return None

    def on_rank_zero_seen(self) -> None:
        self._unseen = False

    def on_rank_zero_gone(self, now: float) -> None:
        if not self._done:
            self._leave_by(now + GONE_GRACE_S, "rank 0 is gone")

    def expect_exit(self, exit_code: int, now: float) -> None:
        self._done, self.exit_code = True, exit_code
        self.leave_by, self.reason = now + self.stop_grace_s, f"the end took longer than {self.stop_grace_s:g} s"

    def _leave_by(self, when: float, reason: str) -> None:
        if self.leave_by is None or when < self.leave_by:
            self.leave_by, self.reason = when, reason


def _earlier(first: float | None, second: float) -> float:
    return second if first is None else min(first, second)
