"""Which engines the router knows, across the deaths of either side.

Invariants
- `engine.routed` is the desired state; `tend`, which runs beside each router, reconciles the router with it. The flag
  is set before the router is told of an engine, and cleared before the engine is taken out. An engine that is routed
  and that the router does not list yet is owed.
- A router that is down refuses nothing: a dead router knows no engine, and the next one is told of all that are routed
  (`restore`). An engine that is being updated, or whose memory is away, may be unable to answer a router that looks it
  up. That does not count against it; the router is told again once the engine serves.
- An engine is started again on its address only after the router has forgotten it (`forgotten`), even if the router
  hung while the engine was taken out.
- An engine that is taken out while it is being added ends up unknown. The router lists a worker only some time after it
  was asked to, so `tend` looks for latecomers afterwards; no other task waits for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import anyio
import structlog

from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError
from asyncrl.inference.engines.engine import ManagedEngine, on_each
from asyncrl.inference.engines.lifecycle import ROUTABLE
from asyncrl.inference.routing.router_client import LATE_S, WORKER_TIMEOUT_S, RouterClient, Worker
from asyncrl.observability.waits import waiting
from asyncrl.tasks import Changes

REMOVE_TIMEOUT_S = 1.0
"""For a removal; a router that takes longer hangs, and is about to be restarted."""
ANSWER_TIMEOUT_S = 2.0
FORGOTTEN_TIMEOUT_S = 120.0
"""By then the health probes have found a router that hangs, and it was replaced."""
LOOK_S = 0.1
PROBE_PATIENCE_S = 5.0
"""From the end of a router to an answer through its successor; 0.2 s measured."""

_log = structlog.get_logger(__name__)


class Routing:
    """The router's list of engines."""

    def __init__(self, router: RouterClient) -> None:
        self.router = router
        self._adding: list[tuple[ManagedEngine, anyio.CancelScope]] = []
        self._owed: list[ManagedEngine] = []
        """Engines that are routed, and not known to be listed."""
        self._in_doubt = False
        """Whether the router's list may differ from the desired state, so that `tend` has to look."""
        self._changes = Changes()

    async def add(self, engine: ManagedEngine) -> None:
        """Makes the router send requests to `engine`; raises EngineError when a router that lives refuses it.

        Nothing to do for an engine that has left service meanwhile.
        """
        if engine.state not in ROUTABLE:
            return
        engine.routed = True
        try:
            await self._tell(engine, WORKER_TIMEOUT_S)
        except EngineError:
            engine.routed = False
            self.doubt()  # the router may list it all the same
            raise

    async def remove(self, engine: ManagedEngine) -> None:
        """No new request reaches `engine`; those that run in it go on."""
        if not engine.routed:
            return
        engine.routed = False
        for added, scope in self._adding:
            if added is engine:
                scope.cancel()
                self.doubt()
        gone = False
        with contextlib.suppress(EngineError, TimeoutError), anyio.move_on_after(REMOVE_TIMEOUT_S):
            await self.router.remove(engine.endpoint.url, REMOVE_TIMEOUT_S)
            gone = True
        if not gone:  # the router hangs for a moment, or for good: `tend` takes the engine out
            self.doubt()

    async def forgotten(self, engine: ManagedEngine) -> None:
        """Returns when the router does not list `engine`, which is not routed; warns if it lists it to the end."""
        try:
            with waiting("removal from the router", engine.engine_id, FORGOTTEN_TIMEOUT_S):
                while True:  # a router that ends has a successor, and one that hangs may go on
                    with contextlib.suppress(EngineError, TimeoutError):
                        await self.router.remove(engine.endpoint.url, ANSWER_TIMEOUT_S)
                        return
                    await anyio.sleep(LOOK_S)
        except TimeoutError as error:
            _log.warning("an engine is started that the router may still send requests to", reason=str(error))

    async def restore(self, engines: Iterable[ManagedEngine]) -> None:
        """Tells a new router of all engines that are routed; it quarantines an engine that serves and is refused."""
        self._owed = [engine for engine in engines if engine.routed]
        await self._pay(())

    def doubt(self) -> None:
        """Makes `tend` look whether the router's list is the desired one."""
        self._in_doubt = True
        self._changes.notify()

    async def tend(self, engines: Iterable[ManagedEngine]) -> None:
        """Reconciles the router's list with `engine.routed` until cancelled; runs beside the router.

        Takes out engines that are listed and not routed, and adds those that are owed. Quarantines an engine that
        serves and is refused.
        """
        while True:
            while not (self._owed or self._in_doubt):
                await self._changes.wait()
            self._in_doubt = False
            until, looked_at = anyio.current_time() + LATE_S, 0.0
            while looked_at < until or self._owed:
                with contextlib.suppress(EngineError, TimeoutError):
                    listed = await self.router.workers()
                    strangers = [w for w in listed if not w.leaving and not _routed_at(w.url, engines)]
                    for worker in strangers:
                        await self._take_out(worker.url, engines)
                    looked_at = anyio.current_time()
                    await self._pay([worker for worker in listed if worker not in strangers])
                await anyio.sleep(LOOK_S)

    async def _take_out(self, url: str, engines: Iterable[ManagedEngine]) -> None:
        if _routed_at(url, engines):  # since the list was read
            return
        try:
            await self.router.remove(url, REMOVE_TIMEOUT_S)
        finally:
            for engine in _routed_at(url, engines):  # routed meanwhile: the removal may have taken it out
                self._owe(engine)

    async def probe(self, version: str | None, patience_s: float = PROBE_PATIENCE_S) -> None:
        """Has the router answer a generation of `version`; a router that was just started again is given time.

        Raises EngineError when no try within `patience_s` succeeds.
        """
        until = anyio.current_time() + patience_s
        while True:
            try:
                await self.router.probe(version)
                return
            except EngineError:
                if anyio.current_time() > until:
                    raise
                await anyio.sleep(LOOK_S)

    async def _pay(self, listed: Sequence[Worker]) -> None:
        """Tries once to add each engine that is owed and not `listed`; quarantines one that serves and is refused."""
        known = {worker.url for worker in listed if worker.is_healthy and not worker.leaving}
        self._owed = [e for e in self._owed if e.routed and e.endpoint.url not in known]
        before = {engine: engine.moves for engine in self._owed}

        async def tell(engine: ManagedEngine) -> None:
            # An engine that does not serve may be unable to answer: the next try must not wait long for this one.
            if await self._tell(engine, WORKER_TIMEOUT_S if engine.state is EngineState.SERVING else LATE_S):
                self._settle(engine)

        failed = await on_each(list(before), tell)
        for engine, moves in before.items():
            if engine.engine_id in failed and engine.moves == moves and engine.state is EngineState.SERVING:
                self._settle(engine)
                engine.routed = False
                self.doubt()
                await engine.quarantine(failed[engine.engine_id])

    def _settle(self, engine: ManagedEngine) -> None:
        self._owed = [other for other in self._owed if other is not engine]

    def _owe(self, engine: ManagedEngine) -> None:
        self._settle(engine)
        self._owed.append(engine)
        self.doubt()

    async def _tell(self, engine: ManagedEngine, timeout_s: float) -> bool:
        """Returns whether a router that lives heard of it; raises EngineError when the router refuses.

        If no router answers the engine is owed: the router may have ended (then `restore` follows), or hang.
        """
        adding = (engine, anyio.CancelScope())
        self._adding.append(adding)
        try:
            told = False
            with adding[1]:
                told = await self._ask_twice(engine, timeout_s)
            if not told and engine.routed:
                self._owe(engine)
            return told
        except (EngineError, TimeoutError) as error:
            raise EngineError(str(error)) from error
        except BaseException:  # cancelled: `tend` finds out whether the router took it in
            self._owe(engine)
            raise
        finally:
            self._adding.remove(adding)

    async def _ask_twice(self, engine: ManagedEngine, timeout_s: float) -> bool:
        """Returns whether a router heard of it; asks twice, since a router that refuses may be ending and have a
        successor by the second try."""
        for last in (False, True):
            try:
                await self.router.add(engine.endpoint.url, timeout_s)
            except (EngineError, TimeoutError) as error:
                if not await self._lives():
                    return False
                if last or isinstance(error, TimeoutError):
                    raise
            else:
                engine.changed()
                break
        return True

    async def _lives(self) -> bool:
        try:
            with anyio.fail_after(ANSWER_TIMEOUT_S):
                await self.router.workers()
        except (EngineError, TimeoutError):
            return False
        return True


def _routed_at(url: str, engines: Iterable[ManagedEngine]) -> list[ManagedEngine]:
    return [engine for engine in engines if engine.routed and engine.endpoint.url == url]
