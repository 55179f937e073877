"""Starts the fleet's processes through the host and watches each until it ends.

Invariants
- An exit is noticed at once (the host waits on the process) and recorded as an event and a state.
- What makes the fleet unable to serve raises EngineError into the task group: an engine that fails to start, the router
  gone, no engine left. Other waiters get the same error from `check`.
- An engine leaves the router before anything else happens to it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from asyncrl.config import Config
from asyncrl.config.layout import ProcessLayout
from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError
from asyncrl.host import ProcessExit, ProcessSpec
from asyncrl.inference.engine import ManagedEngine
from asyncrl.inference.events import EngineExited, FleetReady
from asyncrl.inference.exits import describe_exit, indent
from asyncrl.inference.launch import engine_argv, engine_environment, router_argv
from asyncrl.inference.lifecycle import LIVE
from asyncrl.inference.router import RouterClient
from asyncrl.inference.scratch import mapped_files, unlink
from asyncrl.observability.events import EventLog

if TYPE_CHECKING:
    from asyncrl.host import EngineHost

ROUTER = "router"
ROUTER_GRACE_S = 1.0
ENGINE_GRACE_S = 2.0
"""An engine holds nothing that needs an orderly end; by itself it takes 6 s."""
TAIL_LINES = 20


class Supervisor:
    """The processes of one fleet."""

    def __init__(
        self,
        config: Config,
        layout: ProcessLayout,
        engines: tuple[ManagedEngine, ...],
        router: RouterClient,
        *,
        host: EngineHost,
        events: EventLog,
        model_path: Path,
        router_log: Path,
        scratch: Path,
    ) -> None:
        self.start_s: float | None = None
        """From `start` to the last engine's first generation; None before."""
        self._config = config
        self._layout = layout
        self._engines = engines
        self._router = router
        self._host = host
        self._events = events
        self._model_path = model_path
        self._router_log = router_log
        self._scratch = scratch
        self._router_answers = False
        self._router_failure: EngineError | None = None
        self._ready: set[str] = set()
        """Engines that have generated."""
        self._failure: EngineError | None = None
        self._stopping = False
        self._changed = anyio.Event()
        self._started_at = 0.0

    def start(self, task_group: TaskGroup, router_port: int, prometheus_port: int) -> None:
        """Spawns everything at once and watches it in `task_group`."""
        self._started_at = anyio.current_time()
        for engine in self._engines:
            task_group.start_soon(self._watched, self._run_engine, engine, name=f"supervise {engine.engine_id}")
        task_group.start_soon(self._watched, self._run_router, router_port, prometheus_port, name="supervise router")

    def check(self) -> None:
        """Raises EngineError once the fleet cannot serve any more."""
        if self._failure is not None:
            raise self._failure
        if self._stopping:
            raise EngineError("the fleet has been disposed of")

    async def wait_ready(self) -> None:
        """Returns when the router answers and every engine has generated; each start has its own deadline."""
        while True:
            self.check()
            if self._router_answers and len(self._ready) == len(self._engines):
                return
            await self._changed.wait()

    async def stop(self) -> None:
        """Ends the router, then the engines; none of it counts as a failure."""
        self._stopping = True
        self._notify()
        await self._end(ROUTER, ROUTER_GRACE_S)
        async with anyio.create_task_group() as task_group:
            for engine in self._engines:
                task_group.start_soon(self._stop_engine, engine)

    async def quarantine(self, engine: ManagedEngine, reason: str) -> None:
        """Takes an engine that cannot be trusted out of service and kills it; its exit is then expected."""
        if engine.state not in LIVE:
            return
        engine.failure = EngineError(f"{engine.engine_id} was taken out of service: {reason}")
        engine.move(EngineState.QUARANTINED, reason)
        with anyio.CancelScope(shield=True):
            await self._unroute(engine)
            await self._host.kill(engine.engine_id)

    async def _watched(self, run: Callable[..., Awaitable[None]], *args: Any) -> None:
        failure: BaseException | None = None
        try:
            await run(*args)
        except* EngineError as group:  # also the host's own: it is gone, and the processes with it
            failure = group
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        if isinstance(failure, EngineError) and not self._stopping:
            self._fail(failure)

    async def _run_engine(self, engine: ManagedEngine) -> None:
        config = self._config
        cores = config.engine.cpus or tuple(sorted(os.sched_getaffinity(0)))
        argv = engine_argv(
            config.engine,
            engine.placement,
            engine.ports,
            model_path=self._model_path,
            host=config.run.host,
            device=self._layout.device,
            dtype=self._layout.dtype,
            context_length=config.model.context_length,
        )
        spec = ProcessSpec(
            name=engine.engine_id,
            argv=argv,
            env=engine_environment(engine.placement, device=self._layout.device, cores=cores, scratch=self._scratch),
            log_path=str(engine.log_path),
            cpus=config.engine.cpus,
        )
        pid = await self._host.spawn(spec)
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(self._boot_engine, engine, pid)
            exited = await self._host.wait(engine.engine_id)
            task_group.cancel_scope.cancel()
        unlink(engine.shared_memory)
        await self._engine_exited(engine, exited)

    async def _boot_engine(self, engine: ManagedEngine, pid: int) -> None:
        try:
            await engine.wait_first_generation(self._config.engine.start_timeout_s)
        except EngineError as error:
            tail = indent(await self._host.tail(engine.engine_id, TAIL_LINES))
            await self.quarantine(engine, f"{error}. Last lines of {engine.log_path}:\n{tail}")
            return
        engine.shared_memory = await anyio.to_thread.run_sync(mapped_files, pid)
        engine.move(EngineState.PENDING_WEIGHTS)
        self._ready.add(engine.engine_id)
        if len(self._ready) == len(self._engines):
            self.start_s = anyio.current_time() - self._started_at
            self._events.emit(FleetReady(engines=len(self._engines), seconds=self.start_s))
        self._notify()

    async def _engine_exited(self, engine: ManagedEngine, exited: ProcessExit) -> None:
        if self._stopping:
            return
        if engine.state is not EngineState.QUARANTINED:
            when = "before its first generation" if engine.state is EngineState.STARTING else f"while {engine.state}"
            engine.failure = EngineError(describe_exit(engine.engine_id, exited, engine.log_path, when))
            self._events.emit(
                EngineExited(
                    engine=engine.engine_id,
                    generation=engine.endpoint.generation,
                    pid=exited.pid,
                    returncode=exited.returncode,
                    log_tail=exited.log_tail,
                )
            )
            engine.move(EngineState.DEAD, f"its process ended ({exited.returncode})")
            await self._unroute(engine)
        failed_to_start = engine.engine_id not in self._ready
        if failed_to_start or not any(other.state in LIVE for other in self._engines):
            raise engine.failure or EngineError(f"{engine.engine_id} ended")

    async def _run_router(self, port: int, prometheus_port: int) -> None:
        argv = router_argv(self._config.router, host=self._config.run.host, port=port, prometheus_port=prometheus_port)
        await self._host.spawn(ProcessSpec(name=ROUTER, argv=argv, env={}, log_path=str(self._router_log)))
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(self._boot_router)
            exited = await self._host.wait(ROUTER)
            task_group.cancel_scope.cancel()
        when = "while engines need it" if self._router_answers else "before it answered"
        raise self._router_failure or EngineError(describe_exit(ROUTER, exited, self._router_log, when))

    async def _boot_router(self) -> None:
        try:
            await self._router.wait_answering(self._config.router.start_timeout_s)
        except TimeoutError as error:
            tail = indent(await self._host.tail(ROUTER, TAIL_LINES))
            self._router_failure = EngineError(f"{error}. Last lines of {self._router_log}:\n{tail}")
            await self._host.kill(ROUTER)
            return
        self._router_answers = True
        self._notify()

    async def _end(self, name: str, grace_s: float) -> None:
        # Refused only where there is nothing to end: never spawned, or the host is gone and the process with it.
        with contextlib.suppress(EngineError):
            await self._host.stop(name, grace_s)

    async def _unroute(self, engine: ManagedEngine) -> None:
        if not engine.routed:
            return
        engine.routed = False
        # A dead router is reported by its own supervision, and its health check drops a dead worker.
        with contextlib.suppress(EngineError, TimeoutError):
            await self._router.remove(engine.endpoint.url)

    async def _stop_engine(self, engine: ManagedEngine) -> None:
        await self._end(engine.engine_id, ENGINE_GRACE_S)
        if engine.state is not EngineState.STOPPED:
            engine.move(EngineState.STOPPED)

    def _fail(self, error: EngineError) -> None:
        self._failure = self._failure or error
        self._notify()
        raise error

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
