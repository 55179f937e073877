"""Keeps an external engine in service: somebody else started it, so there is a url, and no process to watch or to end.

Invariants
- Nothing is done to it before it is known to serve the job's model and to belong to this job alone (`claims.py`). What
  cannot change by waiting (another model, another server, another job's engine) is told at once.
- Then it joins as any engine does (a real generation, then the published weights), after it was put in order: its
  previous user may have left it paused, with an open update session, or generating.
- One that does not answer at the start is asked again without end, as long as others serve; the start waits
  `ABSENT_S` for it.
- Health probes and calls that fail find out that it has died or hangs. It is then taken out of the router, and nothing
  else is done to it. When it answers again it joins anew, as a new generation.
- After `stop` it lives on: unpaused, without a session, idle, unknown to the router, and free for another job. One that
  another job has taken meanwhile is left as it is.
- `run` returns when the engine is not wanted any more, and raises EngineError when it did not join the first time, or
  left more often than the policy allows. It raises nothing else.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from asyncrl.config.arguments.argument_list import argument_list
from asyncrl.config.checks.engine_args import PACKAGE
from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError, counted
from asyncrl.inference.engines.engine import ManagedEngine, reason_of
from asyncrl.inference.engines.health import watch_health
from asyncrl.inference.engines.keeper import Keeper, KeeperContext
from asyncrl.inference.engines.lifecycle import LIVE
from asyncrl.inference.engines.restarts import RestartHistory
from asyncrl.inference.external.claims import claim, give_back
from asyncrl.inference.external.same_model import difference
from asyncrl.inference.fleet_events import ProcessGivenUp
from asyncrl.inference.sglang.engine_api import EngineRequestError, ModelInfo, ServerInfo
from asyncrl.inference.updates.deadlines import Deadlines
from asyncrl.inference.updates.sessions import close_session
from asyncrl.observability.waits import WAITS, waiting

POLL_S = 0.2
ABSENT_S = 10.0
"""How long the start waits for an engine that does not answer, while others do."""
_FINAL = frozenset({200, 401, 403, 404, 405, 501})
"""HTTP statuses of a refusal that no waiting changes; 200: an answer that is none of an engine."""

_log = structlog.get_logger(__name__)


class ExternalKeeper(Keeper):
    """One external engine."""

    def __init__(self, engine: ManagedEngine, context: KeeperContext, model: Path, owner: str) -> None:
        """`model`: directory of the job's model. `owner`: the job's name."""
        super().__init__(engine, context)
        self._model = model
        self._owner = owner
        self._claimed = False
        """Whether this keeper has made the engine the job's own."""
        self._left = anyio.Event()
        """Set when the engine, as it last joined, is taken out of service."""
        self._scope = anyio.CancelScope()
        self._in_order = False
        """Whether it was put in order for the last time already."""

    def successor(self) -> ExternalKeeper:
        """A new keeper for the same engine."""
        return ExternalKeeper(self.engine, self.context, self._model, self._owner)

    async def _keep(self) -> None:
        with self._scope:
            await self._live()

    async def _end(self) -> None:
        """Leaves the engine in order. One that takes longer hangs; its owner has to end it."""
        self._scope.cancel()
        await self.context.routing.remove(self.engine)
        await self._wait_returned()
        if self._in_order or not self._claimed:
            return
        self._in_order = True
        client, step_s = self.engine.client, self.context.deadlines.step_s
        try:
            with waiting("last order", self.engine.engine_id, self.context.deadlines.take_back_s):
                if (owner := await client.owner(step_s)) != self._owner:
                    raise EngineError(f"it belongs to {owner or 'nobody'} by now")
                await put_in_order(self.engine, self.context.deadlines)
                await give_back(client, step_s)
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
                    f"{self.engine.engine_id} is not taken back: it joined anew {counted(restarts, 'time')} within "
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
        """Looks whose and which engine it is, takes it for the job, puts it in order, and has it generate."""
        engine = self.engine
        info, server = await self._first_answer()
        await self._check(info, server)
        await claim(engine.client, self._owner, self.context.deadlines.step_s)
        self._claimed = True
        await put_in_order(engine, self.context.deadlines)
        await engine.wait_first_generation(self.context.config.engine.start_timeout_s)
        engine.endpoint = replace(engine.endpoint, tensor_parallel=server.tp_size)

    async def _first_answer(self) -> tuple[ModelInfo, ServerInfo]:
        """Asks until the engine says what it is; raises EngineError where that is of no use."""
        engine, config, began = self.engine, self.context.config.engine, anyio.current_time()
        with WAITS.register("answer", engine.engine_id, math.inf):
            while True:
                try:
                    answers = await engine.client.model_info(), await engine.client.server_info()
                except EngineRequestError as error:
                    if error.status in _FINAL:
                        raise EngineError(
                            f"{engine.endpoint.url} is no engine that this job can use: {error}"
                        ) from error
                    last = error
                else:
                    self._note_absence(False)
                    return answers
                waited_s = anyio.current_time() - began
                if waited_s > config.start_timeout_s and not self._others_work():
                    raise EngineError(
                        f"answer: no answer from {engine.engine_id} within {config.start_timeout_s:g} s; is an engine "
                        f"running at {engine.endpoint.url}? last: {last}"
                    )
                self._note_absence(waited_s > ABSENT_S)
                await anyio.sleep(POLL_S)

    def _note_absence(self, absent: bool) -> None:
        if absent and not self.absent:
            url = self.engine.endpoint.url
            _log.warning("an external engine does not answer; it is asked again", engine=self.engine.engine_id, url=url)
        if absent is not self.absent:
            self.absent = absent
            self.context.observer.changed()

    def _others_work(self) -> bool:
        others = (engine for engine in self.context.engines if engine is not self.engine)
        return any(engine.state in LIVE and engine.state is not EngineState.STARTING for engine in others)

    async def _check(self, info: ModelInfo, server: ServerInfo) -> None:
        """Raises EngineError for an engine that cannot take the weights of this job."""
        name, known = f"{self.engine.engine_id}: {self.engine.endpoint.url}", argument_list(PACKAGE)
        if server.version is not None and server.version not in (known.version, known.other_version):
            raise EngineError(f"{name} runs SGLang {server.version}, and this job needs {known.version}")
        if (server.dp_size, server.pp_size) != (1, 1):
            raise EngineError(
                f"{name} runs with data parallel size {server.dp_size} and pipeline parallel size {server.pp_size}, "
                "but new weights reach tensor-parallel ranks only"
            )
        if (differs := await anyio.to_thread.run_sync(difference, self._model, info, server)) is not None:
            raise EngineError(
                f"{name} serves another model ({differs}); nothing was written into it. Start it with {self._model}"
            )

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
            why = "it was restarted, or somebody else uses it"
            await self.quarantine(f"it serves weights {held!r} instead of {engine.version!r}: {why}")


async def put_in_order(engine: ManagedEngine, deadlines: Deadlines) -> None:
    """Leaves the engine idle, unpaused and without an update session, whatever state it was in."""
    await engine.client.abort_all(deadlines.step_s)  # an unpaused engine ends its session only after its last request
    await close_session(engine, restored=None, deadlines=deadlines)
