"""Keeps one engine running: spawns it, watches it, and starts it again when it ends.

Invariants
- The end of the engine's process, or of one that it works with, is noticed at once; that it hangs, by health probes.
  In either case it leaves the router first.
- A new process is a new generation. It serves once it holds the published version (`catch_up`), not before.
- `run` returns when the engine is not wanted any more, and raises EngineError with the log's tail when the engine
  failed to start the first time, or ended more often than the policy allows. It raises nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from asyncrl.config.inference import HealthConfig
from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError
from asyncrl.host import ProcessExit, ProcessSpec
from asyncrl.inference.engine import ManagedEngine
from asyncrl.inference.events import EngineExited, ProcessGivenUp, ProcessRestarting
from asyncrl.inference.exits import describe_exit, indent
from asyncrl.inference.health import watch_health
from asyncrl.inference.keeper import CatchUpEngine
from asyncrl.inference.lifecycle import LIVE
from asyncrl.inference.processes import first_end, working_processes
from asyncrl.inference.restarts import RestartHistory, RestartPolicy
from asyncrl.inference.routing import Routing
from asyncrl.inference.scratch import mapped_files, unlink
from asyncrl.inference.shared_gpus import SharedGpus
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import WAITS

if TYPE_CHECKING:
    from asyncrl.host import EngineHost

GRACE_S = 2.0
"""An engine holds nothing that needs an orderly end; by itself it takes 6 s."""
TAIL_LINES = 20
RETURN_TIMEOUT_S = 5.0
"""For `run` to return once its process has ended: milliseconds, unless the loop is starved."""
SHARED_MEMORY_LOOK_S = 1.0
"""Pause between two looks at what an engine that starts has in /dev/shm; one takes some 10 ms."""
HEAD_START_S = 0.1
"""For the router to forget an engine before it is killed: 2 to 70 ms measured."""


class EngineKeeper:
    """One engine and its process."""

    def __init__(
        self,
        engine: ManagedEngine,
        spec: ProcessSpec,
        *,
        host: EngineHost,
        routing: Routing,
        policy: RestartPolicy,
        health: HealthConfig,
        start_timeout_s: float,
        events: EventLog,
        on_ready: Callable[[], None],
        catch_up: CatchUpEngine,
        gpus: SharedGpus,
    ) -> None:
        """`on_ready` hears of each process that generated; `catch_up` then brings the engine to serve."""
        self.engine = engine
        self.has_generated = False
        """Whether any process of this engine ever did."""
        self.health_paused = False
        self.restarts = 0
        self._spec = spec
        self._host = host
        self._routing = routing
        self._policy = policy
        self._health = health
        self._start_timeout_s = start_timeout_s
        self._events = events
        self._on_ready = on_ready
        self._catch_up = catch_up
        self._gpus = gpus
        self._unwanted = anyio.Event()
        self._running = False
        self._returned = anyio.Event()

    @property
    def wanted(self) -> bool:
        """Whether the engine is to run."""
        return not self._unwanted.is_set()

    async def run(self) -> None:
        if not self.wanted:
            return
        self._running = True
        try:
            await self._run()
        finally:
            self._returned.set()

    async def _run(self) -> None:
        history = RestartHistory()
        while True:
            exited = await self._live()
            unlink(self.engine.shared_memory)
            if not self.wanted:
                if self.engine.state is EngineState.DRAINING and not exited.requested:
                    self.engine.move(EngineState.DEAD, f"its process ended while draining ({exited.returncode})")
                return
            await self._account(exited)
            failure = self.engine.failure or EngineError(f"{self.engine.engine_id} ended")
            if not self.has_generated:
                raise failure
            history, delay_s = self._policy.after_end(history, anyio.current_time())
            restarts = len(history.restarts)
            if delay_s is None:
                self._events.emit(ProcessGivenUp(name=self.engine.engine_id, restarts=restarts, reason=str(failure)))
                raise EngineError(
                    f"{self.engine.engine_id} is not started again: it was {restarts} times within "
                    f"{self._policy.window_s:g} s (engine.max_restarts, engine.restart_window_s). The last time: "
                    f"{failure}"
                )
            self._events.emit(
                ProcessRestarting(
                    name=self.engine.engine_id, restarts=restarts, delay_s=delay_s, reason=str(failure).splitlines()[0]
                )
            )
            with WAITS.register("restart", self.engine.engine_id, delay_s), anyio.move_on_after(delay_s):
                await self._unwanted.wait()
            await self._gpus.wait_turn(self.engine, self._unwanted)
            if self._unwanted.is_set():
                return
            self.restarts += 1
            self.engine.renew()

    async def retire(self) -> None:
        """No new request reaches the engine; one that serves is DRAINING from now on, and its end is no failure."""
        self._unwanted.set()
        if self.engine.state is EngineState.SERVING:
            self.engine.move(EngineState.DRAINING)
        await self._routing.remove(self.engine)

    async def stop(self) -> None:
        """Ends the engine for good; it is STOPPED afterwards. May be called at any time, and again."""
        self._unwanted.set()
        await self._routing.remove(self.engine)
        # Refused only where there is nothing to end: never spawned, or the host is gone and the process with it.
        with contextlib.suppress(EngineError):
            await self._host.stop(self.engine.engine_id, GRACE_S)
        if self._running:
            with anyio.move_on_after(RETURN_TIMEOUT_S):
                await self._returned.wait()  # nothing of it meddles with the process that may follow
        if self.engine.state is not EngineState.STOPPED:
            self.engine.move(EngineState.STOPPED)

    async def quarantine(self, reason: str) -> None:
        """Takes the engine out of service and kills its process, whose end is then expected."""
        engine = self.engine
        if engine.state not in LIVE:
            return
        engine.failure = EngineError(f"{engine.engine_id} was taken out of service: {reason}")
        engine.move(EngineState.QUARANTINED, reason)
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as task_group:
                task_group.start_soon(self._routing.remove, engine)
                # Its requests end with it and are sent elsewhere: a router that is slow to forget must not delay that.
                await anyio.sleep(HEAD_START_S)
                if engine.state is not EngineState.QUARANTINED:  # it ended by itself, and the next bears its name
                    return
                with contextlib.suppress(EngineError):  # the host is gone, and every process with it
                    await self._host.kill(engine.engine_id)

    async def _live(self) -> ProcessExit:
        """One process from its spawn to its end."""
        pid = await self._host.spawn(self._spec)
        if not self.wanted:  # it was stopped before there was a process to end
            return await self._host.kill(self.engine.engine_id)
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(self._serve, pid)
            task_group.start_soon(self._note_shared_memory, pid)
            exited = await self._host.wait(self.engine.engine_id)
            task_group.cancel_scope.cancel()
        return exited

    async def _serve(self, pid: int) -> None:
        """Brings a process to serve and watches over it; cancelled when it ends."""
        engine = self.engine
        try:
            await engine.wait_first_generation(self._start_timeout_s)
        except EngineError as error:
            tail = indent(await self._host.tail(engine.engine_id, TAIL_LINES))
            await self.quarantine(f"{error}. Last lines of {self._spec.log_path}:\n{tail}")
            return
        engine.shared_memory = await anyio.to_thread.run_sync(mapped_files, pid)
        working = await anyio.to_thread.run_sync(working_processes, pid)
        if not engine.frozen:
            engine.move(EngineState.PENDING_WEIGHTS)
        self.has_generated = True
        self._on_ready()
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(self._watch_processes, working)
            task_group.start_soon(self._watch_health)
            await self._catch_up(engine)

    async def _note_shared_memory(self, pid: int) -> None:
        """Until it generates, which an engine may not live to see: nobody can look once it has ended."""
        while self.engine.state is EngineState.STARTING:
            self.engine.shared_memory |= await anyio.to_thread.run_sync(mapped_files, pid)
            await anyio.sleep(SHARED_MEMORY_LOOK_S)

    async def _watch_processes(self, working: dict[int, str]) -> None:
        ended = await first_end(working)
        if self.wanted:
            tail = indent(await self._host.tail(self.engine.engine_id, TAIL_LINES))
            await self.quarantine(f"its process {ended} ended. Last lines of {self._spec.log_path}:\n{tail}")

    async def _watch_health(self) -> None:
        await watch_health(
            self.engine.engine_id,
            self._health,
            subject=self._subject,
            probe=self.engine.client.health_generate,
            convict=self.quarantine,
        )

    def _subject(self) -> Hashable:
        serves = self.engine.state in (EngineState.SERVING, EngineState.DRAINING)
        return (self.engine.endpoint.generation, self.engine.moves) if serves and not self.health_paused else None

    async def _account(self, exited: ProcessExit) -> None:
        """The state and the reason of an engine whose process ended unasked."""
        engine = self.engine
        if engine.state is EngineState.QUARANTINED:
            return
        when = "before its first generation" if engine.state is EngineState.STARTING else f"while {engine.state}"
        engine.failure = EngineError(describe_exit(engine.engine_id, exited, Path(self._spec.log_path), when))
        engine.move(EngineState.DEAD, f"its process ended ({exited.returncode})")
        await self._routing.remove(engine)
        self._events.emit(
            EngineExited(
                engine=engine.engine_id,
                generation=engine.endpoint.generation,
                pid=exited.pid,
                returncode=exited.returncode,
                log_tail=exited.log_tail,
            )
        )
