"""When a process that ended is started again: a pure policy, time is passed in.

The first restart within the window comes at once, since most deaths are single events; each further pause is twice as
long. A process that ends too often is given up: the cause of its death will not change by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """When one process was restarted (monotonic seconds)."""

    restarts: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Decides after each end of a process."""

    limit: int
    """Restarts within `window_s`; the next end is final."""
    window_s: float

    def after_end(self, history: RestartHistory, now: float) -> tuple[RestartHistory, float | None]:
        """The new history, and the pause in seconds before the restart; None gives the process up."""
        recent = tuple(at for at in history.restarts if at > now - self.window_s)
        if len(recent) >= self.limit:
            return RestartHistory(recent), None
        delay_s = min(FIRST_DELAY_S * 2.0 ** (len(recent) - 1), LONGEST_DELAY_S) if recent else 0.0
        return RestartHistory((*recent, now + delay_s)), delay_s
