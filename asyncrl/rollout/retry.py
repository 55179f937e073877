"""When a failed generation request is sent again: a pure policy, without clock or randomness.

Two budgets. Failures in which an engine may have worked in vain (connection lost, 5xx, silence, abort, broken answer)
are counted: `retries` of them per sample. Failures in which nothing was taken on (429, 503, nobody listening) cost no
attempt: they are waited out with growing pauses for `patience_s` in all, so that a restart of the router or a full
queue loses no sample; likewise aborts, where it is updates of the weights that abort. What the engine refuses (4xx) is
the sample's own error and never sent again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class FailureKind(StrEnum):
    """What happened to one attempt."""

    DISCONNECTED = "disconnected"
    """The connection broke before the whole answer was there."""
    SERVER_ERROR = "server_error"
    """A 5xx other than 503."""
    TIMED_OUT = "timed_out"
    """No answer within rollout.request_timeout_s."""
    ABORTED = "aborted"
    """The engine gave up the request half-way."""
    MALFORMED = "malformed"
    """An answer that cannot be what the engine sampled."""
    BUSY = "busy"
    """429 or 503: come again later."""
    UNREACHABLE = "unreachable"
    """Nobody accepts connections at the router's address."""
    REFUSED = "refused"
    """Any other 4xx: this request can never succeed."""


WAITED_OUT = frozenset({FailureKind.BUSY, FailureKind.UNREACHABLE})


@dataclass(frozen=True, slots=True)
class RetryHistory:
    """What one sample has been through."""

    failures: int = 0
    """Attempts that counted."""
    pauses: int = 0
    """Attempts that did not."""
    paused_s: float = 0.0
    """Time spent waiting them out."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Decides after each failure; see the module's docstring."""

    retries: int
    """Counted failures after which another attempt is still made."""
    patience_s: float
    """Longest total pause for failures that do not count."""
    first_delay_s: float = 0.1
    """Pause after the first failure; doubles with each (long enough for a router to notice a dead engine)."""
    longest_delay_s: float = 5.0
    waited_out: frozenset[FailureKind] = WAITED_OUT
    """Failures that do not count."""

    def after(self, history: RetryHistory, kind: FailureKind, jitter: float) -> tuple[RetryHistory, float | None]:
        """The new history, and the pause in seconds before the next attempt; None gives up.

        `jitter` in [0, 1) spreads the pause over [½, 1½) of its nominal length: a crowd must not return at once.
        """
        if kind is FailureKind.REFUSED:
            return replace(history, failures=history.failures + 1), None
        if kind in self.waited_out:
            delay = self._delay(history.pauses, jitter)
            if history.paused_s + delay > self.patience_s:
                return history, None
            return replace(history, pauses=history.pauses + 1, paused_s=history.paused_s + delay), delay
        after = replace(history, failures=history.failures + 1)
        return after, self._delay(history.failures, jitter) if after.failures <= self.retries else None

    def _delay(self, earlier: int, jitter: float) -> float:
        return min(self.first_delay_s * 2.0 ** min(earlier, 30), self.longest_delay_s) * (0.5 + jitter)
