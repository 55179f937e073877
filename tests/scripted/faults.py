"""Faults as data, and the book that decides which call meets which fault. No I/O.

A fault belongs to an endpoint and to the nth call of the endpoint after the fault was set. A fault `before` replaces
the effect of the call, or delays it if the fault ends by itself. A fault `after` replaces only the answer: the effect
has taken place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["status", "hang", "freeze", "drop", "truncate", "slow", "garbage", "die", "call"]
"""See `Fault.kind`."""
When = Literal["before", "after"]
"""Before or after the effect of the call."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault at one endpoint."""

    endpoint: str
    """Path without the leading slash. A router also has `add_worker` and `remove_worker`."""
    kind: Kind
    """status: an error answer. hang: no answer. freeze: from this call on, the scheduler does nothing, while the HTTP
    server lives. drop: closes the connection. truncate: sends half of the body, then closes the connection. slow: sends
    the body in pieces. garbage: 200 with a body that is not JSON. die: ends the process. call: awaits `action`."""
    when: When = "before"
    nth: int = 1
    """Number of the first call that meets the fault; counts calls of the endpoint since the fault was set."""
    times: int | None = 1
    """Number of calls that meet the fault; None: all from the nth on."""
    status: int = 500
    """HTTP status, for `status`."""
    message: str = "refused by script"
    """Message of the answer, for `status`."""
    seconds: float | None = None
    """For `hang`, the time until it ends (None: never). For `slow`, the time that the body takes."""
    action: Callable[[], Awaitable[Any]] | None = None
    """For `call`; only in the same process."""


class FaultBook:
    """The faults that are set and have not happened so far."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Fault, int]] = []
        """Each fault, and the number of calls of its endpoint since it was set."""
        self.happened: list[Fault] = []
        """Faults that calls met, in order."""

    def add(self, *faults: Fault) -> None:
        """Sets faults, besides those that are set already."""
        self._waiting += [(fault, 0) for fault in faults]

    def clear(self) -> None:
        """Removes all faults that are set; faults in progress go on."""
        self._waiting.clear()

    def concern(self, endpoint: str) -> bool:
        """True if a call of `endpoint` may meet a fault, or suffer from one that has happened."""
        return bool(self.happened) or any(fault.endpoint == endpoint for fault, _ in self._waiting)

    def next(self, endpoint: str) -> Fault | None:
        """Counts a call of `endpoint`; returns the fault that it meets, the one set first if there are several."""
        due: Fault | None = None
        waiting: list[tuple[Fault, int]] = []
        for fault, seen in self._waiting:
            if fault.endpoint == endpoint:
                seen += 1
                if seen >= fault.nth and due is None:
                    due = fault
                if fault.times is not None and seen >= fault.nth + fault.times - 1:
                    continue
            waiting.append((fault, seen))
        self._waiting = waiting
        if due is not None:
            self.happened.append(due)
        return due


def refuse(endpoint: str, status: int = 400, message: str = "refused by script", **more: Any) -> Fault:
    """An error answer; by default the call has no effect."""
    return Fault(endpoint, "status", status=status, message=message, **more)


def hang(endpoint: str, **more: Any) -> Fault:
    """No answer, for ever or for `seconds`."""
    return Fault(endpoint, "hang", **more)


def freeze(endpoint: str, **more: Any) -> Fault:
    """A scheduler that does nothing from this call on."""
    return Fault(endpoint, "freeze", **more)


def drop(endpoint: str, **more: Any) -> Fault:
    """A connection that closes without an answer."""
    return Fault(endpoint, "drop", **more)


def truncate(endpoint: str, **more: Any) -> Fault:
    """Half of the answer, then a closed connection."""
    return Fault(endpoint, "truncate", when="after", **more)


def slow(endpoint: str, seconds: float, **more: Any) -> Fault:
    """An answer whose body takes `seconds`."""
    return Fault(endpoint, "slow", when="after", seconds=seconds, **more)


def garbage(endpoint: str, **more: Any) -> Fault:
    """A 200 whose body is not JSON."""
    return Fault(endpoint, "garbage", **more)


def die(endpoint: str, **more: Any) -> Fault:
    """The end of the process."""
    return Fault(endpoint, "die", **more)


def instead(endpoint: str, action: Callable[[], Awaitable[Any]], **more: Any) -> Fault:
    """Awaits `action` before the effect, or after it."""
    return Fault(endpoint, "call", action=action, **more)
