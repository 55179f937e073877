"""Which engines the router knows, kept true over the deaths of either side.

Invariants
- `engine.routed` says that the router knows the engine, or will as soon as it answers again. It is set before the
  router is told and cleared before the engine is taken out: the router never knows an engine of which it is not said.
- A router that is down refuses nothing: whoever is routed is told to the next one (`restore`), and a dead router
  knows nobody.
- An engine that is taken out while it is being added ends up unknown. The router lists a worker only some time after it
  was asked to, so `tend` looks for latecomers afterwards; nobody waits for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import anyio

from asyncrl.errors import EngineError
from asyncrl.inference.engine import ManagedEngine
from asyncrl.inference.router import RouterClient
from asyncrl.inference.sessions import on_each

REMOVE_TIMEOUT_S = 1.0
"""A router that takes longer hangs, and is about to be restarted."""
ANSWER_TIMEOUT_S = 2.0
LATE_S = 12.0
"""How long a router may still come to list a worker (`worker_startup_timeout_secs`, and a little)."""
LOOK_S = 0.1


class Routing:
    """The router's list of engines."""

    def __init__(self, router: RouterClient) -> None:
        self.router = router
        self._adding: list[tuple[ManagedEngine, anyio.CancelScope]] = []
        self._interrupted = anyio.Event()

    async def add(self, engine: ManagedEngine) -> None:
        """Makes the router send requests to `engine`; raises EngineError when a router that lives refuses it."""
        engine.routed = True
        adding = (engine, anyio.CancelScope())
        self._adding.append(adding)
        try:
            with adding[1]:
                await self._ask_twice(engine)
        except (EngineError, TimeoutError) as error:
            engine.routed = False
            raise EngineError(str(error)) from error
        finally:
            self._adding.remove(adding)

    async def _ask_twice(self, engine: ManagedEngine) -> None:
        """The one that refused first may have been a router on its end, and the one that lives its successor."""
        for last in (False, True):
            try:
                await self.router.add(engine.endpoint.url)
            except (EngineError, TimeoutError) as error:
                if not await self._lives():
                    return
                if last or isinstance(error, TimeoutError):
                    raise
            else:
                engine.changed()
                return

    async def remove(self, engine: ManagedEngine) -> None:
        """No new request reaches `engine`; those that run in it go on."""
        if not engine.routed:
            return
        engine.routed = False
        for added, scope in self._adding:
            if added is engine:
                scope.cancel()
                self._interrupted.set()
        gone = False
        with contextlib.suppress(EngineError, TimeoutError), anyio.move_on_after(REMOVE_TIMEOUT_S):
            await self.router.remove(engine.endpoint.url, REMOVE_TIMEOUT_S)
            gone = True
        if not gone:  # the router stands still for a moment, or for good: `tend` sees to it
            self._interrupted.set()

    async def restore(self, engines: Iterable[ManagedEngine]) -> dict[str, str]:
        """Tells a new router of everyone who is routed; engine id → reason for those that it does not take."""
        return await on_each([engine for engine in engines if engine.routed], self.add)

    async def tend(self, engines: Iterable[ManagedEngine]) -> None:
        """Takes out whoever the router comes to list after being taken out; runs beside it until cancelled."""
        while True:
            await self._interrupted.wait()
            self._interrupted = anyio.Event()
            until, looked_at = anyio.current_time() + LATE_S, 0.0
            while looked_at < until:
                with contextlib.suppress(EngineError, TimeoutError):
                    listed = await self.router.workers()
                    routed = {engine.endpoint.url for engine in engines if engine.routed}
                    for worker in listed:
                        if worker.url not in routed and not worker.leaving:
                            await self.router.remove(worker.url, REMOVE_TIMEOUT_S)
                    looked_at = anyio.current_time()
                await anyio.sleep(LOOK_S)

    async def _lives(self) -> bool:
        try:
            with anyio.fail_after(ANSWER_TIMEOUT_S):
                await self.router.workers()
        except (EngineError, TimeoutError):
            return False
        return True
