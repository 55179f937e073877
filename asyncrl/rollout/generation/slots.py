"""Slots: how many requests may be in flight, and which request gets the next free slot.

A slot is held by a request, from just before it is sent until its answer is there. Neither a program that thinks
between two requests nor a sample that waits for its score holds one.

Invariants
- At most `limit` slots are given. A limit that is lowered takes no slot away: requests in flight go on.
- The next request of an open session goes before new sessions; among each other, requests go in the order in which they
  came.
- While slots are held back (`holding`, `drained`) none is given.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import structlog

from asyncrl.observability.waits import WAITS, waiting
from asyncrl.tasks import Changes

_log = structlog.get_logger(__name__)


class Slots:
    """Counts the requests in flight."""

    def __init__(self, limit: int) -> None:
        """`limit` slots."""
        self._limit = limit
        self._in_use = 0
        self._held = 0
        self._waiting: deque[anyio.Event] = deque()
        """Requests of open sessions; the event is set when the request has its slot."""
        self.changes = Changes()
        """Wakes tasks when a slot may have become free."""

    @property
    def in_use(self) -> int:
        """Slots that are given: requests on the wire, or waiting to be sent again."""
        return self._in_use

    @property
    def limit(self) -> int:
        """Most slots that are given."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        self._give_on()

    @property
    def free(self) -> bool:
        """Whether a new session may `take` a slot now."""
        return self._in_use < self._limit and not self._held and not self._waiting

    def take(self) -> None:
        """Takes a slot that is `free`."""
        self._in_use += 1

    def give_back(self) -> None:
        """Ends the use of one slot; the request that waits longest gets it."""
        self._in_use -= 1
        self._give_on()

    async def acquire(self, subject: str) -> None:
        """Takes a slot for the next request of an open session, once there is one; `subject` names it as a wait."""
        if self.free:
            self.take()
            return
        given = anyio.Event()
        self._waiting.append(given)
        try:
            with WAITS.register("slot", subject, math.inf):  # every request before it has its deadline
                await given.wait()
        except BaseException:
            if given.is_set():
                self.give_back()
            else:
                self._waiting.remove(given)
            raise

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Gives no slot, while requests in flight go on."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self._give_on()

    @asynccontextmanager
    async def drained(self, timeout_s: float) -> AsyncIterator[None]:
        """Gives no slot, and enters once all requests in flight have ended, or after `timeout_s` all the same."""
        with self.holding():
            try:
                with waiting("end of the requests in flight", "engines", timeout_s):
                    while self._in_use:
                        await self.changes.wait()
            except TimeoutError as error:
                _log.warning("the weights are updated all the same", reason=str(error), requests=self._in_use)
            yield

    def _give_on(self) -> None:
        while self._waiting and self._in_use < self._limit and not self._held:
            self._in_use += 1
            self._waiting.popleft().set()
        self.changes.notify()
