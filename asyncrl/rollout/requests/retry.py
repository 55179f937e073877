"""When a failed generation request is sent again: a pure policy, without clock or randomness.

There are two budgets. A failure after which an engine may have worked in vain (connection lost, 5xx, silence, abort,
broken answer) is counted: a request has `retries` of them. A failure in which no engine took the request (429, 503, no
listener) is waited out: with growing pauses, for `patience_s` in all, so that a restart of the router or a full queue
loses no sample. Aborts are waited out too, where updates of the weights abort requests. Where the answer names a time
(Retry-After), nothing is sent before it. A request that the engine refuses (4xx) is wrong in itself and never sent
again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum


class RequestFault(StrEnum):
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
    """No process accepts connections at the router's address."""
    REFUSED = "refused"
    """Any other 4xx: this request can never succeed."""


WAITED_OUT = frozenset({RequestFault.BUSY, RequestFault.UNREACHABLE})
MOST_ATTEMPTS = 10_000
"""Most attempts of one request: the width of their numbers in request ids."""


def parse_retry_after(header: str | None, now: datetime) -> float | None:
    """Seconds until the time that a Retry-After header names (RFC 9110, 10.2.3); None without one that can be read.

    `now` has a time zone.
    """
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            named = parsedate_to_datetime(header)
        except ValueError:
            return None
        seconds = (named if named.tzinfo is not None else named.replace(tzinfo=UTC)).timestamp() - now.timestamp()
    return max(0.0, seconds) if math.isfinite(seconds) else None


@dataclass(frozen=True, slots=True)
class RetryHistory:
    """The failures of one request so far."""

    failures: int = 0
    """Failures that were counted."""
    pauses: int = 0
    """Failures that were waited out."""
    paused_s: float = 0.0
    """Seconds of the pauses for these."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Decides after each failure; see the module's docstring."""

    retries: int
    """Most counted failures after which another attempt is made."""
    patience_s: float
    """Longest total pause for failures that are waited out."""
    first_delay_s: float = 0.1
    """Pause after the first failure; doubles with each (long enough for a router to notice a dead engine)."""
    longest_delay_s: float = 5.0
    waited_out: frozenset[RequestFault] = WAITED_OUT
    """The failures that are waited out."""

    def after(
        self, history: RetryHistory, kind: RequestFault, jitter: float, retry_after_s: float | None = None
    ) -> tuple[RetryHistory, float | None]:
        """The new history, and the pause in seconds before the next attempt; None gives up.

        `jitter` in [0, 1) spreads the pause over [½, 1½) of its nominal length, so that a crowd does not return at
        once. `retry_after_s` comes on top of it, cut to the patience that is left.
        """
        if kind is RequestFault.REFUSED or history.failures + history.pauses + 1 >= MOST_ATTEMPTS:
            return replace(history, failures=history.failures + 1), None
        if kind in self.waited_out:
            delay = self._delay(history.pauses, jitter)
            left = self.patience_s - history.paused_s - delay
            if left < 0:
                return history, None
            delay += min(retry_after_s or 0.0, left)
            return replace(history, pauses=history.pauses + 1, paused_s=history.paused_s + delay), delay
        after = replace(history, failures=history.failures + 1)
        return after, self._delay(history.failures, jitter) if after.failures <= self.retries else None

    def _delay(self, earlier: int, jitter: float) -> float:
        return min(self.first_delay_s * 2.0 ** min(earlier, 30), self.longest_delay_s) * (0.5 + jitter)
