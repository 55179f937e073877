"""What goes wrong, at which call: data, and the book that decides. No I/O.

A fault belongs to an endpoint and to the nth call of it that comes after the fault was set. `before` happens instead of
the effect (or, for what ends by itself, ahead of it), `after` when the effect has taken place and only the answer is
owed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["status", "hang", "freeze", "drop", "truncate", "slow", "garbage", "die", "call"]
When = Literal["before", "after"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    endpoint: str
    """Path without the leading slash; of a router also `add_worker` and `remove_worker`."""
    kind: Kind
    """status: an error answer. hang: this call is not answered. freeze: from this call on the scheduler does nothing
    more, while the HTTP server lives. drop: the connection is closed. truncate: half of the body, then closed.
    slow: the body comes piece by piece. garbage: 200 with a body that is no JSON. die: the process ends.
    call: `action` is awaited."""
    when: When = "before"
    nth: int = 1
    """Counts calls of the endpoint from the moment in which the fault is set."""
    times: int | None = 1
    """How many calls, from the nth on; None: all."""
    status: int = 500
    message: str = "refused by script"
    seconds: float | None = None
    """hang: how long (None: for ever). slow: how long the body takes."""
    action: Callable[[], Awaitable[Any]] | None = None
    """For `call`, in the same process only."""


class FaultBook:
    """Faults that wait for their call."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Fault, int]] = []
        """A fault, and how many calls of its endpoint it has seen."""
        self.happened: list[Fault] = []

    def add(self, *faults: Fault) -> None:
        self._waiting += [(fault, 0) for fault in faults]

    def clear(self) -> None:
        """No more faults; those that have begun go on."""
        self._waiting.clear()

    def concern(self, endpoint: str) -> bool:
        """Whether a call of `endpoint` may be hit by a fault, or suffer from one that has happened."""
        return bool(self.happened) or any(fault.endpoint == endpoint for fault, _ in self._waiting)

    def next(self, endpoint: str) -> Fault | None:
        """Counts a call of `endpoint` and returns the fault that it meets: the first that was set, if several."""
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
    return Fault(endpoint, "status", status=status, message=message, **more)


def hang(endpoint: str, **more: Any) -> Fault:
    return Fault(endpoint, "hang", **more)


def freeze(endpoint: str, **more: Any) -> Fault:
    return Fault(endpoint, "freeze", **more)


def drop(endpoint: str, **more: Any) -> Fault:
    return Fault(endpoint, "drop", **more)


def truncate(endpoint: str, **more: Any) -> Fault:
    return Fault(endpoint, "truncate", when="after", **more)


def slow(endpoint: str, seconds: float, **more: Any) -> Fault:
    return Fault(endpoint, "slow", when="after", seconds=seconds, **more)


def garbage(endpoint: str, **more: Any) -> Fault:
    return Fault(endpoint, "garbage", **more)


def die(endpoint: str, **more: Any) -> Fault:
    return Fault(endpoint, "die", **more)


def instead(endpoint: str, action: Callable[[], Awaitable[Any]], **more: Any) -> Fault:
    """Awaits `action`, ahead of the effect or after it."""
    return Fault(endpoint, "call", action=action, **more)
