"""Aborts: ends requests in the engines that no sample needs any more; the engines would go on in vain.

An engine notices by itself that its client has left, but only after 3 to 8 s, and through a router later still.

Invariants
- Each id is sent whole, in a call of its own, to every engine: only the router knows which engine has the request. An
  engine ignores an id that it does not know. It ends every request whose id begins with the one that was sent, so none
  of our ids begins another.
- No abort is sent while engines are paused. A paused engine holds new requests back in its server, and an abort that
  finds a request there has no effect and is used up: the request would run to its end after the pause. For the same
  reason no abort is sent in the instant in which its request was sent.
- Aborts are counted and bounded, and every batch of them is reported; `add` never waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import anyio

from asyncrl.rollout.group_events import RequestsAborted
from asyncrl.rollout.requests.engine_clock import EngineClock
from asyncrl.rollout.requests.engine_queries import AbortProgress, EngineQueries
from asyncrl.tasks import Changes

GATHER_S = 0.2
"""From the first id to the aborts. By then every request that was sent has reached the scheduler of its engine (some ms
measured), also a request that an engine let in after a pause; and ids that are added together are sent together."""
SEND_TIMEOUT_S = 10.0
"""Longest time for one batch of ids; an engine that has not got all of them by then notices by itself."""
CLOSE_TIMEOUT_S = 2.0
"""Longest time for the ids that are left at the end."""


class Aborts:
    """Run `serve` in a task, then `add`; `aclose` at the end."""

    def __init__(
        self, queries: EngineQueries, clock: EngineClock, *, on_sent: Callable[[RequestsAborted], None]
    ) -> None:
        """`on_sent` gets the report of every batch of aborts."""
        self._queries = queries
        self._clock = clock
        self._on_sent = on_sent
        self._waiting: dict[str, str] = {}
        """Reason by id, of aborts that are not sent yet."""
        self._added = Changes()
        self._sending = anyio.Lock()
        self._serving = anyio.CancelScope()
        self._closed = False
        self.requests = 0
        """Ids that were sent."""

    def add(self, rid: str, reason: str) -> None:
        """Gives the request of this id up. Its abort is sent in a later turn of the loop, by `serve`."""
        self._waiting[rid] = reason
        self._added.notify()

    async def serve(self) -> None:
        """Sends what is added, until `aclose`."""
        with self._serving:
            while True:
                while not self._waiting:
                    await self._added.wait()
                await self._clock.running()
                await anyio.sleep(GATHER_S)
                await self.send(SEND_TIMEOUT_S)

    async def send(self, timeout_s: float) -> None:
        """Sends what was added by now, unless engines are paused; returns after `timeout_s` all the same."""
        with anyio.move_on_after(timeout_s):
            async with self._sending:
                if self._closed or self._clock.paused or not self._waiting:
                    return
                batch, self._waiting = self._waiting, {}
                progress = AbortProgress()
                try:
                    await self._queries.abort(list(batch), progress)
                finally:
                    self.requests += len(batch)
                    self._on_sent(
                        RequestsAborted(
                            requests=len(batch),
                            engines=progress.engines,
                            heard=progress.heard,
                            reasons=dict(Counter(batch.values())),
                        )
                    )

    async def aclose(self) -> None:
        """Sends what is left, within a bound. Idempotent."""
        with anyio.CancelScope(shield=True):
            await self.send(CLOSE_TIMEOUT_S)
        self._closed = True
        self._serving.cancel()
        await self._queries.aclose()
