"""Which engines the router knows, kept true over the deaths of either side.

Invariants
- `engine.routed` says that the router knows the engine, or is to as soon as it can: it is set before the router is told
  and cleared before the engine is taken out. The router never knows an engine of which it is not said, and what is said
  and not so yet is owed: `tend`, which runs beside each router, makes it so.
- A router that is down refuses nothing: whoever is routed is told to the next one (`restore`), and a dead router
  knows nobody. An engine that is being updated, or whose memory is away, may be unable to answer a router that looks it
  up: it is not to blame for that, and is told again once it serves.
- An engine that is started again on its address is unknown to the router before that (`forgotten`), also to one that
  stood still as it was to be taken out.
- An engine that is taken out while it is being added ends up unknown. The router lists a worker only some time after it
  was asked to, so `tend` looks for latecomers afterwards; nobody waits for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence

import anyio
import structlog

from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.engines.lifecycle import ROUTABLE
from asyncrl.inference.routing.router_client import LATE_S, WORKER_TIMEOUT_S, RouterClient, Worker
from asyncrl.inference.updates.sessions import on_each
from asyncrl.observability.waits import waiting

REMOVE_TIMEOUT_S = 1.0
"""A router that takes longer hangs, and is about to be restarted."""
ANSWER_TIMEOUT_S = 2.0
FORGOTTEN_TIMEOUT_S = 120.0
"""By then a router that hangs was found out by its probes and is another."""
LOOK_S = 0.1
PROBE_PATIENCE_S = 5.0
"""From the end of a router to an answer through its successor; 0.2 s measured."""

_log = structlog.get_logger(__name__)

Refuse = Callable[[ManagedEngine, str], Awaitable[None]]
"""What becomes of an engine that serves and that the router does not take, with the reason."""


class Routing:
    """The router's list of engines."""

    def __init__(self, router: RouterClient) -> None:
        self.router = router
        self._adding: list[tuple[ManagedEngine, anyio.CancelScope]] = []
        self._owed: list[ManagedEngine] = []
        """Routed, and not known to be listed."""
        self._interrupted = anyio.Event()

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
            self._interrupted.set()  # the router may list it all the same
            raise

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

    async def forgotten(self, engine: ManagedEngine) -> None:
        """Returns when the router does not list `engine`, which is not routed; warns where it never says so."""
        try:
            with waiting("removal from the router", engine.engine_id, FORGOTTEN_TIMEOUT_S):
                while True:  # a router on its end has a successor, and one that stands still may go on
                    with contextlib.suppress(EngineError, TimeoutError):
                        await self.router.remove(engine.endpoint.url, ANSWER_TIMEOUT_S)
                        return
                    await anyio.sleep(LOOK_S)
        except TimeoutError as error:
            _log.warning("an engine is started that the router may still send requests to", reason=str(error))

    async def restore(self, engines: Iterable[ManagedEngine], refuse: Refuse) -> None:
        """Tells a new router of everyone who is routed."""
        self._owed = [engine for engine in engines if engine.routed]
        await self._pay((), refuse)

    async def tend(self, engines: Iterable[ManagedEngine], refuse: Refuse) -> None:
        """Takes out whoever the router lists and should not, and adds whom it owes; beside it, until cancelled."""
        while True:
            if not self._owed:
                await self._interrupted.wait()
            self._interrupted = anyio.Event()
            until, looked_at = anyio.current_time() + LATE_S, 0.0
            while looked_at < until or self._owed:
                with contextlib.suppress(EngineError, TimeoutError):
                    listed = await self.router.workers()
                    strangers = [w for w in listed if not w.leaving and not _routed_at(w.url, engines)]
                    for worker in strangers:
                        await self._take_out(worker.url, engines)
                    looked_at = anyio.current_time()
                    await self._pay([worker for worker in listed if worker not in strangers], refuse)
                await anyio.sleep(LOOK_S)

    async def _take_out(self, url: str, engines: Iterable[ManagedEngine]) -> None:
        if _routed_at(url, engines):  # by now
            return
        try:
            await self.router.remove(url, REMOVE_TIMEOUT_S)
        finally:
            for engine in _routed_at(url, engines):  # meanwhile: the removal may have met it
                self._owe(engine)

    async def probe(self, version: str | None, patience_s: float = PROBE_PATIENCE_S) -> None:
        """A generation through the router; one that was just started again is given time. Raises EngineError."""
        until = anyio.current_time() + patience_s
        while True:
            try:
                await self.router.probe(version)
                return
            except EngineError:
                if anyio.current_time() > until:
                    raise
                await anyio.sleep(LOOK_S)

    async def _pay(self, listed: Sequence[Worker], refuse: Refuse) -> None:
        """One try for each engine that is owed and not `listed`; one that serves throughout and fails is refused."""
        known = {worker.url for worker in listed if worker.is_healthy and not worker.leaving}
        self._owed = [e for e in self._owed if e.routed and e.endpoint.url not in known]
        before = {engine: engine.moves for engine in self._owed}

        async def tell(engine: ManagedEngine) -> None:
            # Without hope as long as it cannot answer: the next try, once it serves, is not to wait for this one.
            if await self._tell(engine, WORKER_TIMEOUT_S if engine.state is EngineState.SERVING else LATE_S):
                self._settle(engine)

        failed = await on_each(list(before), tell)
        for engine, moves in before.items():
            if engine.engine_id in failed and engine.moves == moves and engine.state is EngineState.SERVING:
                self._settle(engine)
                engine.routed = False
                self._interrupted.set()
                await refuse(engine, failed[engine.engine_id])

    def _settle(self, engine: ManagedEngine) -> None:
        self._owed = [other for other in self._owed if other is not engine]

    def _owe(self, engine: ManagedEngine) -> None:
        self._settle(engine)
        self._owed.append(engine)
        self._interrupted.set()

    async def _tell(self, engine: ManagedEngine, timeout_s: float) -> bool:
        """Whether a router that lives heard of it; EngineError when it refuses.

        Where nobody answers the engine is owed: the router may have ended, and `restore` follows, or stand still.
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
        except BaseException:  # cancelled: whether the router took it in is `tend`'s to find out
            self._owe(engine)
            raise
        finally:
            self._adding.remove(adding)

    async def _ask_twice(self, engine: ManagedEngine, timeout_s: float) -> bool:
        """Whether a router heard of it. One that refused first may have been on its end, and have a successor now."""
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
