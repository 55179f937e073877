"""Keeps a router running: spawns it, watches it, starts it again when it ends or hangs.

Invariants
- A new router is told of every engine that the old one knew. Requests that meet no router in between fail, and the
  client repeats them.
- A process that cannot be started counts as one that ended.
- `run` returns when the router is not wanted any more, and raises EngineError with the log's tail when it never
  answered, or ended more often than the policy allows. It raises nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from pathlib import Path

import anyio

from asyncrl.errors import EngineError, HostLostError
from asyncrl.host import HostedProcess
from asyncrl.inference.engines.exits import describe_exit, last_lines
from asyncrl.inference.engines.health import watch_health
from asyncrl.inference.engines.keeper import KeeperContext
from asyncrl.inference.engines.restarts import RestartHistory
from asyncrl.inference.fleet_events import ProcessGivenUp, ProcessRestarting, RouterRestarted
from asyncrl.observability.waits import WAITS

GRACE_S = 1.0


class RouterKeeper:
    """One router and its process."""

    def __init__(self, context: KeeperContext, process: HostedProcess) -> None:
        """`process` is the router's process, on the host of its node."""
        self.answers = False
        """Whether the present process has answered."""
        self.restarts = 0
        self._context = context
        self._process = process
        self._routing = context.routing
        self._events = context.events
        self._unwanted = anyio.Event()
        self._ended_at: float | None = None
        self._failure: EngineError | None = None

    def successor(self) -> RouterKeeper:
        """A new keeper for the same router, once this one has ended."""
        return RouterKeeper(self._context, self._process)

    async def run(self) -> None:
        """Returns when the router is not wanted any more; raises EngineError when it is given up."""
        history, policy = RestartHistory(), self._context.restart_policy
        while not self._unwanted.is_set():
            await self._live()
            answered, self.answers = self.answers, False
            if self._unwanted.is_set():
                return
            self._ended_at = anyio.current_time()
            failure = self._failure or EngineError(f"{self._process.name} ended")
            if not (answered or self.restarts):
                raise failure
            history, delay_s = policy.after_end(history, self._ended_at)
            if delay_s is None:
                restarts = len(history.restarts)
                self._events.emit(ProcessGivenUp(name=self._process.name, restarts=restarts, reason=str(failure)))
                raise failure
            self._events.emit(
                ProcessRestarting(
                    name=self._process.name,
                    restarts=len(history.restarts),
                    delay_s=delay_s,
                    reason=str(failure).splitlines()[0],
                )
            )
            with WAITS.register("restart", self._process.name, delay_s), anyio.move_on_after(delay_s):
                await self._unwanted.wait()
            self.restarts += 1

    async def stop(self) -> None:
        """Ends the router for good."""
        self._unwanted.set()
        # Refused only where there is nothing to end: never spawned, or the host is gone and the process with it.
        with contextlib.suppress(EngineError):
            await self._process.stop(GRACE_S)

    async def _live(self) -> None:
        """One process from its spawn to its end; leaves in `_failure` why it ended."""
        self._failure = None
        try:
            await self._process.spawn()
        except HostLostError:
            raise
        except EngineError as error:
            self._failure = error
            return
        if self._unwanted.is_set():  # it was stopped before there was a process to end
            with contextlib.suppress(EngineError):
                await self._process.kill()
            return
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(self._serve)
            exited = await self._process.wait()
            task_group.cancel_scope.cancel()
        if self._failure is None:
            when = "while engines need it" if self.answers else "before it answered"
            self._failure = EngineError(describe_exit(self._process.name, exited, self._log_path, when))

    async def _serve(self) -> None:
        router = self._routing.router
        try:
            await router.wait_answering(self._context.config.router.start_timeout_s)
        except TimeoutError as error:
            await self._kill(f"{error}. {await last_lines(self._process)}")
            return
        self.answers = True
        await self._routing.restore(self._context.engines)
        if self._ended_at is not None:
            known = sum(engine.routed for engine in self._context.engines)
            seconds = anyio.current_time() - self._ended_at
            self._events.emit(RouterRestarted(router=self._process.name, engines=known, seconds=seconds))
        self._context.observer.changed()
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(self._routing.tend, self._context.engines)
            health = self._context.config.health
            await watch_health(
                self._process.name, health, subject=self._subject, probe=self._probe, convict=self._convict
            )

    async def _probe(self, timeout_s: float) -> None:
        await self._routing.router.workers()

    def _subject(self) -> Hashable:
        return self.restarts + 1 if self.answers else None

    async def _convict(self, reason: str) -> None:
        await self._kill(f"{self._process.name} was killed: {reason}")

    async def _kill(self, reason: str) -> None:
        self._failure = EngineError(reason)
        with anyio.CancelScope(shield=True), contextlib.suppress(EngineError):
            await self._process.kill()

    @property
    def _log_path(self) -> Path:
        return Path(self._process.spec.log_path)
