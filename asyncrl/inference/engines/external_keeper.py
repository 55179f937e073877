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
from dataclasses import replace

import anyio
import structlog

from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.engines.health import watch_health
from asyncrl.inference.engines.keeper import Keeper, KeeperSettings
from asyncrl.inference.engines.lifecycle import LIVE
from asyncrl.inference.engines.restarts import RestartHistory
from asyncrl.inference.fleet_events import ProcessGivenUp
from asyncrl.inference.sglang.engine_api import EngineRequestError
from asyncrl.inference.updates.deadlines import Deadlines
from asyncrl.inference.updates.sessions import close_session, reason_of
from asyncrl.observability.waits import WAITS, waiting

POLL_S = 0.2

_log = structlog.get_logger(__name__)


class ExternalKeeper(Keeper):
    """One engine of somebody else's."""

    def __init__(self, engine: ManagedEngine, settings: KeeperSettings) -> None:
        super().__init__(engine, settings)
        self._left = anyio.Event()
        self._scope = anyio.CancelScope()
        self._in_order = False
        """Whether it was left to itself already."""

    async def _keep(self) -> None:
        with self._scope:
            await self._live()

    async def _end(self) -> None:
        """Leaves the engine in order; one that takes longer hangs, and is somebody else's to end."""
        self._scope.cancel()
        await self.settings.routing.remove(self.engine)
        await self._wait_returned()
        if self._in_order:
            return
        self._in_order = True
        try:
            with waiting("last order", self.engine.engine_id, self.settings.deadlines.take_back_s):
                await put_in_order(self.engine, self.settings.deadlines)
        except (EngineError, TimeoutError) as error:
            _log.warning("an external engine was left as it was", engine=self.engine.engine_id, reason=reason_of(error))

    async def quarantine(self, reason: str) -> None:
        """Takes the engine out of service; what it does from now on is nothing to the job."""
        engine = self.engine
        if engine.state not in LIVE:
            return
        engine.failure = EngineError(f"{engine.engine_id} ({engine.endpoint.url}) was taken out of service: {reason}")
        engine.move(EngineState.QUARANTINED, reason)
        self._left.set()
        with anyio.CancelScope(shield=True):
            await self.settings.routing.remove(engine)

    async def _live(self) -> None:
        history, policy = RestartHistory(), self.settings.policy
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
                self.settings.events.emit(
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
        """From joining until it is taken out of service."""
        try:
            await self._join()
        except EngineError as error:
            await self.quarantine(str(error))
            return
        self.has_generated = True
        self.engine.move(EngineState.PENDING_WEIGHTS)
        self.settings.on_ready()
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(self._watch_health)
            task_group.start_soon(self.settings.catch_up, self.engine)
            await self._left.wait()
            task_group.cancel_scope.cancel()

    async def _join(self) -> None:
        """Puts the engine in order, has it generate, and asks what it is."""
        engine, last = self.engine, ""
        try:
            with waiting("answer", engine.engine_id, self.settings.start_timeout_s):
                while True:
                    try:
                        await put_in_order(engine, self.settings.deadlines)
                        break
                    except EngineRequestError as error:
                        last = str(error)
                    await anyio.sleep(POLL_S)
        except TimeoutError as error:
            raise EngineError(f"{error}; is an engine running at {engine.endpoint.url}? last: {last}") from error
        await engine.wait_first_generation(self.settings.start_timeout_s)
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
            self.settings.health,
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


async def put_in_order(engine: ManagedEngine, deadlines: Deadlines) -> None:
    """Leaves the engine idle, unpaused and without an update session, in whatever state it was found."""
    await engine.client.abort_all(deadlines.step_s)  # unpaused, it would not end its session before its last request
    await close_session(engine, restored=None, deadlines=deadlines)
