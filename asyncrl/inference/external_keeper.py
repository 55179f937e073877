"""Keeps an engine in service that somebody else started: there is a url, and no process to watch or to end.

Invariants
- It joins as any engine does (a real generation, then the published weights), having been put in order first: whoever
  used it before may have left it paused, with an open update session, or generating.
- That it has died or hangs is found by health probes and by calls that fail. It is then out of the router, and nothing
  is done to it. When it answers again it joins anew, as a new generation.
- Once it is stopped it lives on: unpaused, without a session, idle, and unknown to the router.
- `run` returns when the engine is not wanted any more, and raises EngineError when it did not join the first time, or
  left more often than the policy allows. It raises nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace

import anyio
import structlog

from asyncrl.config.inference import HealthConfig
from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError
from asyncrl.inference.engine import ManagedEngine
from asyncrl.inference.engine_api import EngineRequestError
from asyncrl.inference.events import ProcessGivenUp
from asyncrl.inference.health import watch_health
from asyncrl.inference.keeper import CatchUpEngine
from asyncrl.inference.lifecycle import LIVE
from asyncrl.inference.restarts import RestartHistory, RestartPolicy
from asyncrl.inference.routing import Routing
from asyncrl.inference.sessions import close_session, reason_of
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import WAITS, waiting

POLL_S = 0.2
LEAVE_TIMEOUT_S = 3.0
"""For an engine to be put in order as it leaves; one that takes longer hangs, and is somebody else's to end."""

_log = structlog.get_logger(__name__)


class ExternalKeeper:
    """One engine of somebody else's."""

    def __init__(
        self,
        engine: ManagedEngine,
        *,
        routing: Routing,
        policy: RestartPolicy,
        health: HealthConfig,
        start_timeout_s: float,
        events: EventLog,
        on_ready: Callable[[], None],
        catch_up: CatchUpEngine,
    ) -> None:
        """`on_ready` hears each time that it generated; `catch_up` then brings it to serve."""
        self.engine = engine
        self.has_generated = False
        self.health_paused = False
        self.restarts = 0
        """How often it joined anew."""
        self._routing = routing
        self._policy = policy
        self._health = health
        self._start_timeout_s = start_timeout_s
        self._events = events
        self._on_ready = on_ready
        self._catch_up = catch_up
        self._unwanted = anyio.Event()
        self._left = anyio.Event()
        self._scope = anyio.CancelScope()
        self._in_order = False
        """Whether it was left to itself already."""
        self._running = False
        self._returned = anyio.Event()

    @property
    def wanted(self) -> bool:
        """Whether the engine is to serve."""
        return not self._unwanted.is_set()

    async def run(self) -> None:
        if not self.wanted:
            return
        self._running = True
        try:
            with self._scope:
                await self._run()
        finally:
            self._returned.set()

    async def retire(self) -> None:
        """No new request reaches the engine; one that serves is DRAINING from now on."""
        self._unwanted.set()
        if self.engine.state is EngineState.SERVING:
            self.engine.move(EngineState.DRAINING)
        await self._routing.remove(self.engine)

    async def stop(self) -> None:
        """Ends the engine's part in the job and leaves it in order; it is STOPPED afterwards."""
        self._unwanted.set()
        await self._routing.remove(self.engine)
        self._scope.cancel()
        if self._running:
            await self._returned.wait()
        if not self._in_order:
            self._in_order = True
            try:
                with anyio.fail_after(LEAVE_TIMEOUT_S):
                    await put_in_order(self.engine)
            except (EngineError, TimeoutError) as error:
                _log.warning(
                    "an external engine was left as it was", engine=self.engine.engine_id, reason=reason_of(error)
                )
        if self.engine.state is not EngineState.STOPPED:
            self.engine.move(EngineState.STOPPED)

    async def quarantine(self, reason: str) -> None:
        """Takes the engine out of service; what it does from now on is nothing to the job."""
        engine = self.engine
        if engine.state not in LIVE:
            return
        engine.failure = EngineError(f"{engine.engine_id} ({engine.endpoint.url}) was taken out of service: {reason}")
        engine.move(EngineState.QUARANTINED, reason)
        self._left.set()
        with anyio.CancelScope(shield=True):
            await self._routing.remove(engine)

    async def _run(self) -> None:
        history = RestartHistory()
        while True:
            self._left = anyio.Event()
            await self._serve()
            if not self.wanted:
                return
            failure = self.engine.failure or EngineError(f"{self.engine.engine_id} left")
            if not self.has_generated:
                raise failure
            history, delay_s = self._policy.after_end(history, anyio.current_time())
            if delay_s is None:
                restarts = len(history.restarts)
                self._events.emit(ProcessGivenUp(name=self.engine.engine_id, restarts=restarts, reason=str(failure)))
                raise EngineError(
                    f"{self.engine.engine_id} is not taken back: it joined anew {restarts} times within "
                    f"{self._policy.window_s:g} s (engine.max_restarts, engine.restart_window_s). The last time: "
                    f"{failure}"
                )
            await self._wait_answering(delay_s)
            self.restarts += 1
            self.engine.renew()

    async def _serve(self) -> None:
        """From joining until it is taken out of service."""
        try:
            await self._join()
        except EngineError as error:
            await self.quarantine(str(error))
            return
        self.has_generated = True
        self.engine.move(EngineState.PENDING_WEIGHTS)
        self._on_ready()
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(self._watch_health)
            task_group.start_soon(self._catch_up, self.engine)
            await self._left.wait()
            task_group.cancel_scope.cancel()

    async def _join(self) -> None:
        """Puts the engine in order, has it generate, and asks what it is."""
        engine, last = self.engine, ""
        try:
            with waiting("answer", engine.engine_id, self._start_timeout_s):
                while True:
                    try:
                        await put_in_order(engine)
                        break
                    except EngineRequestError as error:
                        last = str(error)
                    await anyio.sleep(POLL_S)
        except TimeoutError as error:
            raise EngineError(f"{error}; is an engine running at {engine.endpoint.url}? last: {last}") from error
        await engine.wait_first_generation(self._start_timeout_s)
        info = await engine.client.server_info()
        if (info.dp_size, info.pp_size) != (1, 1):
            raise EngineError(
                f"{engine.engine_id}: {engine.endpoint.url} runs with data parallel size {info.dp_size} and pipeline "
                f"parallel size {info.pp_size}, but new weights reach tensor-parallel ranks only"
            )
        engine.endpoint = replace(engine.endpoint, tensor_parallel=info.tp_size)

    async def _wait_answering(self, delay_s: float) -> None:
        """Returns when it answers, at the earliest after `delay_s`. Whoever cannot do without it has a deadline."""
        with WAITS.register("return", self.engine.engine_id, math.inf):
            await anyio.sleep(delay_s)
            while True:
                try:
                    await self.engine.client.ping()
                    return
                except EngineRequestError:
                    await anyio.sleep(POLL_S)

    async def _watch_health(self) -> None:
        await watch_health(
            self.engine.engine_id,
            self._health,
            subject=self._subject,
            probe=self._probe,
            convict=self.quarantine,
        )

    async def _probe(self, timeout_s: float) -> None:
        engine, before = self.engine, self._subject()
        await engine.client.health_generate(timeout_s)
        held = (await engine.client.model_info(timeout_s)).weight_version
        if before is not None and self._subject() == before and held != engine.version:
            # Nobody tells that a process was restarted between two probes: its weights do, and no second look is due.
            await self.quarantine(f"it serves weights {held!r} instead of {engine.version!r}: it was restarted")

    def _subject(self) -> Hashable:
        serves = self.engine.state in (EngineState.SERVING, EngineState.DRAINING)
        return (self.engine.endpoint.generation, self.engine.moves) if serves and not self.health_paused else None


async def put_in_order(engine: ManagedEngine) -> None:
    """Leaves the engine idle, unpaused and without an update session, in whatever state it was found."""
    await engine.client.abort_all()  # unpaused, it would not end its session before its last request
    await close_session(engine, restored=None)
