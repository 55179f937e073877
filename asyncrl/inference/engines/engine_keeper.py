"""Keeps one engine running: spawns it, watches it, and starts it again when it ends.

Invariants
- The end of the engine's process, or of one that it works with, is noticed at once; a hang is found by health probes.
  In either case the engine leaves the router first.
- A new process is a new generation, on the address of the one before. It is started once the router has forgotten that
  address (`Routing.forgotten`), so that no request comes too early. It serves once it holds the published version
  (`catch_up`), not before.
- A process that cannot be started counts as one that ended.
- `run` returns when the engine is not wanted any more, and raises EngineError with the log's tail when the engine
  failed to start the first time, or ended more often than the policy allows. It raises nothing else.
- Once the engine is to be stopped, no task brings it into service any more: `_serve` ends before the process does.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError, HostLostError, counted
from asyncrl.host import HostedProcess, ProcessExit
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.engines.exits import describe_exit, last_lines
from asyncrl.inference.engines.health import watch_health
from asyncrl.inference.engines.keeper import Keeper, KeeperContext
from asyncrl.inference.engines.lifecycle import LIVE
from asyncrl.inference.engines.processes import first_end, working_processes
from asyncrl.inference.engines.restarts import RestartHistory
from asyncrl.inference.fleet_events import EngineExited, ProcessGivenUp, ProcessRestarting
from asyncrl.observability.waits import WAITS
from asyncrl.tasks import first_of

GRACE_S = 2.0
"""An engine holds nothing that needs an orderly end; by itself it takes 6 s."""
HEAD_START_S = 0.1
"""For the router to forget an engine before the engine is killed: 2 to 70 ms measured."""


class EngineKeeper(Keeper):
    """One engine and its process."""

    def __init__(self, engine: ManagedEngine, context: KeeperContext, process: HostedProcess) -> None:
        """`process` is the engine's process, on the host of its node."""
        super().__init__(engine, context)
        self._process = process
        self._serving = anyio.CancelScope()
        """Of the tasks that bring the present process into service and watch it."""

    def successor(self) -> EngineKeeper:
        """A new keeper for the same engine, which starts its process in the same way."""
        return EngineKeeper(self.engine, self.context, self._process)

    async def _keep(self) -> None:
        history, policy = RestartHistory(), self.context.restart_policy
        while True:
            await self._live()
            if not self.wanted:
                return
            failure = self.engine.failure or EngineError(f"{self.engine.engine_id} ended")
            if not self.has_generated:
                raise failure
            history, delay_s = policy.after_end(history, anyio.current_time())
            restarts = len(history.restarts)
            if delay_s is None:
                self._give_up(restarts, str(failure))
                raise EngineError(
                    f"{self.engine.engine_id} is not started again: it was {counted(restarts, 'time')} within "
                    f"{policy.window_s:g} s (engine.max_restarts, engine.restart_window_s). The last time: {failure}"
                )
            self.context.events.emit(
                ProcessRestarting(
                    name=self.engine.engine_id, restarts=restarts, delay_s=delay_s, reason=str(failure).splitlines()[0]
                )
            )
            with WAITS.register("restart", self.engine.engine_id, delay_s), anyio.move_on_after(delay_s):
                await self._unwanted.wait()
            await first_of(partial(self.context.routing.forgotten, self.engine), self._unwanted.wait)
            try:
                await self.context.gpus.wait_turn(self.engine, self._unwanted)
            except EngineError as error:
                self._give_up(restarts, str(error))
                raise
            if self._unwanted.is_set():
                return
            self.restarts += 1
            self.engine.renew()

    def _give_up(self, restarts: int, reason: str) -> None:
        self.context.events.emit(ProcessGivenUp(name=self.engine.engine_id, restarts=restarts, reason=reason))

    async def _end(self) -> None:
        self._serving.cancel()
        await self.context.routing.remove(self.engine)
        # Refused only where there is nothing to end: never spawned, or the host is gone and the process with it.
        with contextlib.suppress(EngineError):
            await self._process.stop(GRACE_S)
        await self._wait_returned()

    async def quarantine(self, reason: str) -> None:
        """Takes the engine out of service and kills its process; that end is then expected."""
        engine = self.engine
        if engine.state not in LIVE:
            return
        engine.failure = EngineError(f"{engine.engine_id} was taken out of service: {reason}")
        engine.move(EngineState.QUARANTINED, reason)
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as task_group:
                task_group.start_soon(self.context.routing.remove, engine)
                # Its requests end with it and are sent elsewhere: a slow router must not delay that.
                await anyio.sleep(HEAD_START_S)
                if engine.state is not EngineState.QUARANTINED:  # it ended by itself, and the next process has its name
                    return
                with contextlib.suppress(EngineError):  # the host is gone, and every process with it
                    await self._process.kill()

    async def _live(self) -> None:
        """One process from its spawn to its end; leaves the outcome in the engine's state and `failure`."""
        self.engine.has_process = True
        try:
            await self._run_process()
        finally:
            self.engine.has_process = False
            self.engine.changed()

    async def _run_process(self) -> None:
        engine, process = self.engine, self._process
        try:
            pid = await process.spawn()
        except HostLostError:
            raise
        except EngineError as error:
            if self.wanted:
                engine.failure = error
                engine.move(EngineState.DEAD, "its process could not be started")
            return
        if self._unwanted.is_set():  # it was stopped before there was a process to end
            with contextlib.suppress(EngineError):
                await process.kill()
            return
        self._serving = anyio.CancelScope()
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(self._serve, pid, self._serving)
            exited = await process.wait()
            task_group.cancel_scope.cancel()
        if not self._unwanted.is_set():
            await self._account(exited)
        elif engine.state is EngineState.DRAINING and not exited.requested:
            engine.move(EngineState.DEAD, f"its process ended while draining ({exited.returncode})")

    async def _serve(self, pid: int, scope: anyio.CancelScope) -> None:
        """Brings a process into service and watches over it, until it ends or is to be stopped."""
        engine = self.engine
        with scope:
            try:
                await engine.wait_first_generation(self.context.config.engine.start_timeout_s)
            except EngineError as error:
                await self.quarantine(f"{error}. {await last_lines(self._process)}")
                return
            working = await anyio.to_thread.run_sync(working_processes, pid)
            if not engine.frozen:
                engine.move(EngineState.PENDING_WEIGHTS)
            self.has_generated = True
            self.context.observer.changed()
            async with anyio.create_task_group() as task_group:
                task_group.start_soon(self._watch_processes, working)
                task_group.start_soon(self._watch_health)
                await self.context.catch_up(engine)

    async def _watch_processes(self, working: dict[int, str]) -> None:
        ended = await first_end(working)
        if self.wanted:
            await self.quarantine(f"its process {ended} ended. {await last_lines(self._process)}")

    async def _watch_health(self) -> None:
        await watch_health(
            self.engine.engine_id,
            self.context.config.health,
            subject=self._subject,
            probe=self.engine.client.health_generate,
            convict=self.quarantine,
        )

    async def _account(self, exited: ProcessExit) -> None:
        """Sets state and failure of an engine whose process ended without being asked to."""
        engine = self.engine
        if engine.state is EngineState.QUARANTINED:
            return
        when = "before its first generation" if engine.state is EngineState.STARTING else f"while {engine.state}"
        engine.failure = EngineError(describe_exit(engine.engine_id, exited, Path(self._process.spec.log_path), when))
        engine.move(EngineState.DEAD, f"its process ended ({exited.returncode})")
        await self.context.routing.remove(engine)
        self.context.events.emit(
            EngineExited(
                engine=engine.engine_id,
                generation=engine.endpoint.generation,
                pid=exited.pid,
                returncode=exited.returncode,
                log_tail=exited.log_tail,
            )
        )
