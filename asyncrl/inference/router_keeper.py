"""Keeps a router running: spawns it, watches it, starts it again when it ends or hangs.

Invariants
- A new router is told of every engine that the old one knew; requests that meet none in between are the client's to
  repeat.
- `run` returns when the router is not wanted any more, and raises EngineError with the log's tail when it never
  answered, or ended more often than the policy allows. It raises nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from asyncrl.config.inference import HealthConfig
from asyncrl.errors import EngineError
from asyncrl.host import ProcessExit, ProcessSpec
from asyncrl.inference.engine import ManagedEngine
from asyncrl.inference.events import ProcessRestarting, RouterRestarted
from asyncrl.inference.exits import describe_exit, indent
from asyncrl.inference.health import watch_health
from asyncrl.inference.restarts import RestartHistory, RestartPolicy
from asyncrl.inference.routing import Routing
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import WAITS

if TYPE_CHECKING:
    from asyncrl.host import EngineHost

GRACE_S = 1.0
TAIL_LINES = 20


class RouterKeeper:
    """One router and its process."""

    def __init__(
        self,
        routing: Routing,
        spec: ProcessSpec,
        *,
        host: EngineHost,
        engines: Iterable[ManagedEngine],
        policy: RestartPolicy,
        health: HealthConfig,
        start_timeout_s: float,
        events: EventLog,
        on_answer: Callable[[], None],
        quarantine: Callable[[ManagedEngine, str], Awaitable[None]],
    ) -> None:
        """`engines`: those that the router may know, read anew at each start; one that it refuses is quarantined."""
        self.answers = False
        self.restarts = 0
        self._routing = routing
        self._spec = spec
        self._host = host
        self._engines = engines
        self._policy = policy
        self._health = health
        self._start_timeout_s = start_timeout_s
        self._events = events
        self._on_answer = on_answer
        self._quarantine = quarantine
        self._unwanted = anyio.Event()
        self._ended_at: float | None = None
        self._failure: EngineError | None = None

    async def run(self) -> None:
        history = RestartHistory()
        while not self._unwanted.is_set():
            exited = await self._live()
            answered, self.answers = self.answers, False
            if self._unwanted.is_set():
                return
            self._ended_at = anyio.current_time()
            when = "while engines need it" if answered else "before it answered"
            failure, self._failure = self._failure, None
            failure = failure or EngineError(describe_exit(self._spec.name, exited, self._log_path, when))
            history, delay_s = self._policy.after_end(history, self._ended_at)
            if delay_s is None or not (answered or self.restarts):
                raise failure
            self._events.emit(
                ProcessRestarting(
                    name=self._spec.name,
                    restarts=len(history.restarts),
                    delay_s=delay_s,
                    reason=str(failure).splitlines()[0],
                )
            )
            with WAITS.register("restart", self._spec.name, delay_s), anyio.move_on_after(delay_s):
                await self._unwanted.wait()
            self.restarts += 1

    async def stop(self) -> None:
        """Ends the router for good."""
        self._unwanted.set()
        # Refused only where there is nothing to end: never spawned, or the host is gone and the process with it.
        with contextlib.suppress(EngineError):
            await self._host.stop(self._spec.name, GRACE_S)

    async def _live(self) -> ProcessExit:
        await self._host.spawn(self._spec)
        if self._unwanted.is_set():  # it was stopped before there was a process to end
            return await self._host.kill(self._spec.name)
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(self._serve)
            exited = await self._host.wait(self._spec.name)
            task_group.cancel_scope.cancel()
        return exited

    async def _serve(self) -> None:
        router = self._routing.router
        try:
            await router.wait_answering(self._start_timeout_s)
        except TimeoutError as error:
            tail = indent(await self._host.tail(self._spec.name, TAIL_LINES))
            await self._kill(f"{error}. Last lines of {self._log_path}:\n{tail}")
            return
        self.answers = True
        refused = await self._routing.restore(self._engines)
        for engine in self._engines:
            if engine.engine_id in refused:
                await self._quarantine(engine, refused[engine.engine_id])
        if self._ended_at is not None:
            known = sum(engine.routed for engine in self._engines)
            seconds = anyio.current_time() - self._ended_at
            self._events.emit(RouterRestarted(router=self._spec.name, engines=known, seconds=seconds))
        self._on_answer()
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(self._routing.tend, self._engines)
            await watch_health(
                self._spec.name, self._health, subject=self._subject, probe=self._probe, convict=self._convict
            )

    async def _probe(self, timeout_s: float) -> None:
        await self._routing.router.workers()

    def _subject(self) -> Hashable:
        return self.restarts + 1 if self.answers else None

    async def _convict(self, reason: str) -> None:
        await self._kill(f"{self._spec.name} was killed: {reason}")

    async def _kill(self, reason: str) -> None:
        self._failure = EngineError(reason)
        with anyio.CancelScope(shield=True), contextlib.suppress(EngineError):
            await self._host.kill(self._spec.name)

    @property
    def _log_path(self) -> Path:
        return Path(self._spec.log_path)
