"""The engines of one transaction: which of them still take part, and why the others do not.

Invariants
- An engine that fails a step takes no further step.
- Only the process that took part is quarantined: one that was started since is not to blame for the one before it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

import anyio

from asyncrl.data.fleet import EngineState
from asyncrl.inference.engines.engine import ManagedEngine, on_each
from asyncrl.inference.routing.routing import Routing


class Participants:
    """Engines that go through the steps of a transaction together."""

    def __init__(self, engines: Iterable[ManagedEngine]) -> None:
        self.remaining = list(engines)
        """Engines that did not fail so far."""
        self.failed: dict[str, str] = {}
        """Engine id → reason, of engines that take part no more."""
        self._processes = {engine.engine_id: (engine, engine.endpoint.generation) for engine in self.remaining}

    async def each(self, step: Callable[[ManagedEngine], Awaitable[None]]) -> None:
        """Takes `step` on each remaining engine, all at once; excludes those that fail."""
        self.exclude(await on_each(self.remaining, step))

    def exclude(self, reasons: Mapping[str, str]) -> None:
        """Lets the engines named in `reasons` (engine id → reason) take part no more."""
        self.failed |= reasons
        self.remaining = [engine for engine in self.remaining if engine.engine_id not in reasons]

    def keep_updating(self) -> None:
        """Drops engines that left the transaction by themselves: they died, or were taken out of service."""
        self.remaining = [engine for engine in self.remaining if engine.state is EngineState.UPDATING]

    async def quarantine_failed(self) -> None:
        """Quarantines the engines that failed, all at once: one that hangs must not delay the next."""

        async def one(engine: ManagedEngine, generation: int, reason: str) -> None:
            if engine.endpoint.generation == generation:
                await engine.quarantine(reason)

        async with anyio.create_task_group() as task_group:
            for engine_id, reason in self.failed.items():
                if engine_id in self._processes:
                    task_group.start_soon(one, *self._processes[engine_id], reason)

    def complaints(self) -> str:
        """`engine-0: why; engine-1: why`, of the engines that failed."""
        return complaints(self.failed)


def complaints(failed: Mapping[str, str]) -> str:
    """`engine-0: why; engine-1: why`, from engine id → reason."""
    return "; ".join(f"{engine_id}: {reason}" for engine_id, reason in failed.items())


async def register(engines: Iterable[ManagedEngine], routing: Routing) -> None:
    """Adds engines that serve and are not routed to the router; one that it refuses is quarantined, and started again.

    An engine whose memory is still away is paused: requests wait in it until it has all of it back.
    """
    states = (EngineState.SERVING, EngineState.OFFLOADED)
    new = Participants(engine for engine in engines if not engine.routed and engine.state in states)
    await new.each(routing.add)
    await new.quarantine_failed()
