"""Keeps an external engine in service: somebody else started it, so there is a url, and no process to watch or to end.

Invariants
- It joins as any engine does (a real generation, then the published weights), after it was put in order: its previous
  user may have left it paused, with an open update session, or generating.
- Health probes and calls that fail find out that it has died or hangs. It is then taken out of the router, and nothing
  else is done to it. When it answers again it joins anew, as a new generation.
- After `stop` it lives on: unpaused, without a session, idle, and unknown to the router.
- `run` returns when the engine is not wanted any more, and raises EngineError when it did not join the first time, or
  left more often than the policy allows. It raises nothing else.
"""

from __future__ import annotations

import math
from dataclasses import replace

import anyio
import structlog

from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError
from asyncrl.inference.engines.engine import ManagedEngine, reason_of
from asyncrl.inference.engines.health import watch_health
from asyncrl.inference.engines.keeper import Keeper, KeeperContext
from asyncrl.inference.engines.lifecycle import LIVE
from asyncrl.inference.engines.restarts import RestartHistory
from asyncrl.inference.fleet_events import ProcessGivenUp
from asyncrl.inference.sglang.engine_api import EngineRequestError
from asyncrl.inference.updates.deadlines import Deadlines
from asyncrl.inference.updates.sessions import close_session
from asyncrl.observability.waits import WAITS, waiting

POLL_S = 0.2

_log = structlog.get_logger(__name__)


class ExternalKeeper(Keeper):
    """One external engine."""

    def __init__(self, engine: ManagedEngine, context: KeeperContext) -> None:
        super().__init__(engine, context)
        self._left = anyio.Event()
        """Set when the engine, as it last joined, is taken out of service."""
        self._scope = anyio.CancelScope()
        self._in_order = False
        """Whether it was put in order for the last time already."""

    def successor(self) -> ExternalKeeper:
        """A new keeper for the same engine."""
        return ExternalKeeper(self.engine, self.context)

    async def _keep(self) -> None:
        with self._scope:
            await self._live()

    async def _end(self) -> None:
        """Leaves the engine in order. One that takes longer hangs; its owner has to end it."""
        self._scope.cancel()
        await self.context.routing.remove(self.engine)
        await self._wait_returned()
        if self._in_order:
            return
        self._in_order = True
        try:
            with waiting("last order", self.engine.engine_id, self.context.deadlines.take_back_s):
                await put_in_order(self.engine, self.context.deadlines)
        except (EngineError, TimeoutError) as error:
            _log.warning("an external engine was left as it was", engine=self.engine.engine_id, reason=reason_of(error))

    async def quarantine(self, reason: str) -> None:
        """Takes the engine out of service; nothing is done to the engine itself."""
        engine = self.engine
        if engine.state not in LIVE:
            return
        engine.failure = EngineError(f"{engine.engine_id} ({engine.endpoint.url}) was taken out of service: {reason}")
        engine.move(EngineState.QUARANTINED, reason)
        self._left.set()
        with anyio.CancelScope(shield=True):
            await self.context.routing.remove(engine)

    async def _live(self) -> None:
        history, policy = RestartHistory(), self.context.restart_policy
        while True:
            self._left = anyio.Event()
            await self._serve()
            if not self.wanted:
                return
            failure = self.engine.failure or EngineError(f"{self.engine.engine_id} left")
            if not self.has_generated:
                raise failure
            history, delay_s = policy.after_end(history, anyio.current_time())
            if delay_s is None:
                restarts = len(history.restarts)
                self.context.events.emit(
                    ProcessGivenUp(name=self.engine.engine_id, restarts=restarts, reason=str(failure))
                )
                raise EngineError(
                    f"{self.engine.engine_id} is not taken back: it joined anew {restarts} times within "
                    f"{policy.window_s:g} s (engine.max_restarts, engine.restart_window_s). The last time: "
                    f"{failure}"
                )
            await self._wait_answering(delay_s)
            self.restarts += 1
            self.engine.renew()

    async def _serve(self) -> None:
        """Has the engine join, and returns when it is taken out of service."""
        try:
            await self._join()
        except EngineError as error:
            await self.quarantine(str(error))
            return
        self.has_generated = True
        self.engine.move(EngineState.PENDING_WEIGHTS)
        self.context.observer.changed()
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(self._watch_health)
            task_group.start_soon(self.context.catch_up, self.engine)
            await self._left.wait()
            task_group.cancel_scope.cancel()

    async def _join(self) -> None:
        """Puts the engine in order, has it generate, and asks for its parallel sizes."""
        engine, last = self.engine, ""
        try:
            with waiting("answer", engine.engine_id, self.context.config.engine.start_timeout_s):
                while True:
                    try:
                        await put_in_order(engine, self.context.deadlines)
                        break
                    except EngineRequestError as error:
                        last = str(error)
                    await anyio.sleep(POLL_S)
        except TimeoutError as error:
            raise EngineError(f"{error}; is an engine running at {engine.endpoint.url}? last: {last}") from error
        await engine.wait_first_generation(self.context.config.engine.start_timeout_s)
        info = await engine.client.server_info()
        if (info.dp_size, info.pp_size) != (1, 1):
            raise EngineError(
                f"{engine.engine_id}: {engine.endpoint.url} runs with data parallel size {info.dp_size} and pipeline "
                f"parallel size {info.pp_size}, but new weights reach tensor-parallel ranks only"
            )
        engine.endpoint = replace(engine.endpoint, tensor_parallel=info.tp_size)

    async def _wait_answering(self, delay_s: float) -> None:
        """Returns when it answers, at the earliest after `delay_s`; tasks that need it have deadlines of their own."""
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
            self.context.config.health,
            subject=self._subject,
            probe=self._probe,
            convict=self.quarantine,
        )

    async def _probe(self, timeout_s: float) -> None:
        engine, before = self.engine, self._subject()
        await engine.client.health_generate(timeout_s)
        held = (await engine.client.model_info(timeout_s)).weight_version
        if before is not None and self._subject() == before and held != engine.version:
            # A process that was restarted between two probes shows by its weights alone; one such answer is enough.
            await self.quarantine(f"it serves weights {held!r} instead of {engine.version!r}: it was restarted")


async def put_in_order(engine: ManagedEngine, deadlines: Deadlines) -> None:
    """Leaves the engine idle, unpaused and without an update session, whatever state it was in."""
    await engine.client.abort_all(deadlines.step_s)  # an unpaused engine ends its session only after its last request
    await close_session(engine, restored=None, deadlines=deadlines)
