"""Aborts: requests that nobody waits for any more are ended in the engines, which else work on in vain.

An engine notices by itself that its client has left, but only after 3 to 8 s, and through a router later still.

Invariants
- Ids are told one by one, whole, to every engine: nobody but the router knows which one has it. (One that knows an id
  also ends what begins with it, so no id of ours begins another; ids that it does not know it ignores.)
- Nothing is told while engines are paused. A paused engine holds new requests back in its server, and an abort that
  finds one there is used up without effect: that request would run to its end afterwards, whatever is said later.
  For the same reason nothing is told in the instant in which it was sent.
- All is counted and bounded, by `on_told`; whoever gives a request up waits for none of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import anyio

from asyncrl.rollout.group_events import RequestsAborted
from asyncrl.rollout.requests.engine_clock import EngineClock
from asyncrl.rollout.requests.engine_queries import EngineQueries, Told

GATHER_S = 0.2
"""From the first id to the telling: by then what was sent has reached the scheduler (some ms measured), also what an
engine let in after a pause; and what is given up together is told together."""
TELL_TIMEOUT_S = 10.0
"""Longest telling of one batch of ids; engines that have not heard all by then find out by themselves."""
CLOSE_TIMEOUT_S = 2.0
"""Of what is left at the end."""


class Aborts:
    """Run `serve` in a task, then `add`; `aclose` at the end."""

    def __init__(
        self, control: EngineQueries, clock: EngineClock, *, on_told: Callable[[RequestsAborted], None]
    ) -> None:
        self._control = control
        self._clock = clock
        self._on_told = on_told
        self._given_up: dict[str, str] = {}
        """Reason by id, of those that are still to be told."""
        self._added = anyio.Event()
        self._telling = anyio.Lock()
        self._serving = anyio.CancelScope()
        self._closed = False
        self.requests = 0
        """Ids that were told."""

    def add(self, rid: str, reason: str) -> None:
        """The request of this id is given up; nobody is told before the next turns of `serve`."""
        self._given_up[rid] = reason
        self._added.set()

    async def serve(self) -> None:
        """Tells engines what is added, until `aclose`."""
        with self._serving:
            while True:
                await self._added.wait()
                await self._clock.running()
                await anyio.sleep(GATHER_S)
                await self.tell(TELL_TIMEOUT_S)

    async def tell(self, timeout_s: float) -> None:
        """Tells what was added by now, unless engines are paused; returns after `timeout_s` all the same."""
        with anyio.move_on_after(timeout_s):
            async with self._telling:
                if self._closed or self._clock.paused or not self._given_up:
                    return
                batch, self._given_up, self._added = self._given_up, {}, anyio.Event()
                told = Told()
                try:
                    await self._control.abort(list(batch), told)
                finally:
                    self.requests += len(batch)
                    self._on_told(
                        RequestsAborted(
                            requests=len(batch),
                            engines=told.engines,
                            heard=told.heard,
                            reasons=dict(Counter(batch.values())),
                        )
                    )

    async def aclose(self) -> None:
        """Tells what is left, within a bound. Idempotent."""
        with anyio.CancelScope(shield=True):
            await self.tell(CLOSE_TIMEOUT_S)
        self._closed = True
        self._serving.cancel()
        await self._control.aclose()
