"""Which engines the router knows, kept true over the deaths of either side.

Invariants
- `engine.routed` says that the router knows the engine, or will as soon as it answers again. It is set before the
  router is told and cleared before the engine is taken out: the router never knows an engine of which it is not said.
- A router that is down refuses nothing: whoever is routed is told to the next one (`restore`), and a dead router
  knows nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import anyio

from asyncrl.errors import EngineError
from asyncrl.inference.engine import ManagedEngine
from asyncrl.inference.router import RouterClient

REMOVE_TIMEOUT_S = 1.0
"""A router that takes longer hangs, and is about to be restarted."""
ANSWER_TIMEOUT_S = 2.0


class Routing:
    """The router's list of engines."""

    def __init__(self, router: RouterClient) -> None:
        self.router = router

    async def add(self, engine: ManagedEngine) -> None:
        """Makes the router send requests to `engine`; raises EngineError when a router that lives refuses it."""
        engine.routed = True
        try:
            await self.router.add(engine.endpoint.url)
        except (EngineError, TimeoutError):
            if not await self._lives():
                return
            engine.routed = False
            raise
        engine.changed()

    async def remove(self, engine: ManagedEngine) -> None:
        """No new request reaches `engine`; those that run in it go on."""
        if not engine.routed:
            return
        engine.routed = False
        with contextlib.suppress(EngineError, TimeoutError):
            await self.router.remove(engine.endpoint.url, REMOVE_TIMEOUT_S)

    async def restore(self, engines: Iterable[ManagedEngine]) -> None:
        """Tells a new router of everyone who is routed."""
        async with anyio.create_task_group() as task_group:
            for engine in engines:
                if engine.routed:
                    task_group.start_soon(self.add, engine)

    async def _lives(self) -> bool:
        try:
            with anyio.fail_after(ANSWER_TIMEOUT_S):
                await self.router.workers()
        except (EngineError, TimeoutError):
            return False
        return True
