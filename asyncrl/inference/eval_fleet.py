"""The engines that only evaluate: started when they are first needed, pinned to one checkpoint at a time.

Invariants
- No engine of it serves anything but the pinned checkpoint: one that is started again loads that first, and a pin that
  fails leaves none that serves.
- A pin is believed when every engine has said, after loading, which version it holds, and the router has answered with
  that version. Until then nothing is evaluated.
- The pinned checkpoint is in use until the next pin, and its files stay: an engine that is started again reads them.
- Whatever goes wrong here is an EngineError for whoever asked, never the end of the job. A fleet that failed is started
  anew when it is next asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from asyncrl.config import Config
from asyncrl.config.checks.served import EVAL
from asyncrl.config.layout import ProcessLayout
from asyncrl.data.fleet import EngineState, EvalFleetInfo
from asyncrl.errors import EngineError
from asyncrl.inference.building import Builder, ServedModel
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.engines.group import EngineGroup
from asyncrl.inference.fleet_events import EvalFleetPinned
from asyncrl.inference.routing.routing import Routing
from asyncrl.inference.sglang.engine_api import EngineRequestError
from asyncrl.inference.updates.copies_in_use import CopiesInUse, is_there
from asyncrl.inference.updates.deadlines import Deadlines
from asyncrl.inference.updates.sessions import on_each, reason_of
from asyncrl.observability.events import EventLog

if TYPE_CHECKING:
    from asyncrl.host import EngineHost


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    directory: Path
    version: str


class EvalFleet:
    """The group of `eval.fleet`."""

    def __init__(
        self,
        config: Config,
        layout: ProcessLayout,
        builder: Builder,
        *,
        host: EngineHost,
        copies: CopiesInUse,
        events: EventLog,
    ) -> None:
        self._copies = copies
        self._config = config
        self._layout = layout
        self._builder = builder
        self._host = host
        self._events = events
        self._group: EngineGroup | None = None
        self._pinned: _Checkpoint | None = None
        self._holding = ExitStack()
        """Keeps the pinned checkpoint in use."""
        self._lock = anyio.Lock()
        self._closed = False
        self.health_paused = False
        """Whether engines that are started from now on are not to be probed."""

    def close(self) -> None:
        """Nothing of it is started from now on."""
        self._closed = True

    @property
    def group(self) -> EngineGroup | None:
        """None until it was started."""
        return self._group

    async def start(self, task_group: TaskGroup, model: ServedModel) -> None:
        """Starts router and engines, if they were not, and returns when all have generated.

        `model` is the trained one. Raises EngineError where there is no `eval.fleet`, or it cannot start.
        """
        async with self._lock:
            await (await self._started(task_group, model)).wait_ready()

    async def pin(self, task_group: TaskGroup, model: ServedModel, directory: Path, version: str) -> EvalFleetInfo:
        """Brings every engine to the checkpoint in `directory` (Hugging Face names), to be known as `version`.

        Raises EngineError where one cannot be brought there in two attempts; none serves then.
        """
        with self._copies.held(directory):  # from now on, also while another pin is under way
            return await self._pin(task_group, model, _Checkpoint(directory, version))

    async def _pin(self, task_group: TaskGroup, model: ServedModel, checkpoint: _Checkpoint) -> EvalFleetInfo:
        async with self._lock:
            began = anyio.current_time()
            self._pinned = None
            self._holding.close()
            group = await self._started(task_group, model)
            for last in (False, True):
                try:
                    engines = await self._try(group, checkpoint)
                    break
                except EngineError:
                    group.check()
                    if last:
                        raise
            self._pinned = checkpoint
            self._holding.enter_context(self._copies.held(checkpoint.directory))
            urls = tuple(engine.endpoint.url for engine in engines)
            seconds = anyio.current_time() - began
            self._events.emit(EvalFleetPinned(version=checkpoint.version, engines=len(urls), seconds=seconds))
            return EvalFleetInfo(group.routing.router.url, checkpoint.version, urls)

    async def _try(self, group: EngineGroup, checkpoint: _Checkpoint) -> list[ManagedEngine]:
        """Brings all engines that are wanted to the checkpoint, and waits for those that start; raises EngineError."""
        await group.wait_ready()
        await group.wait_updatable(len(group.engines), f"an evaluation of weights {checkpoint.version}")
        engines = [engine for engine in group.engines if group.is_wanted(engine)]
        for engine in engines:
            engine.move(EngineState.UPDATING, f"to be pinned to weights {checkpoint.version}")
        try:
            failed = await on_each(engines, lambda engine: _load(engine, checkpoint, group))
            if failed:
                told = "; ".join(f"{engine_id}: {reason}" for engine_id, reason in failed.items())
                raise EngineError(f"weights {checkpoint.version} cannot be evaluated: {told}")
            await self._serve(group, engines, checkpoint.version)
        except BaseException as error:
            await self._take_back(group, engines, reason_of(error))
            raise
        return engines

    async def _started(self, task_group: TaskGroup, model: ServedModel) -> EngineGroup:
        settings = self._config.eval.fleet
        if settings is None:
            raise EngineError("there are no engines for evaluation only; add a section [eval.fleet]")
        if self._group is not None:
            await self._group.start_over()
            return self._group
        deadlines = await anyio.to_thread.run_sync(Deadlines.of_model, model.path, settings.tensor_parallel)
        if self._closed:
            raise EngineError("the fleet has been disposed of")
        router, spec = self._builder.router(f"router-{EVAL}")
        self._group = group = EngineGroup(
            EVAL,
            self._config,
            host=self._host,
            routing=Routing(router),
            router_spec=spec,
            events=self._events,
            task_group=task_group,
            catch_up=self._follow,
            deadlines=deadlines,
            essential=False,
        )
        group.pause_health(self.health_paused)
        group.start_router()
        served = ServedModel(EVAL, model.path, settings, model.context_length)
        for placement in self._layout.beside[EVAL]:
            group.start_engine(*self._builder.engine(placement, served))
        return group

    async def _follow(self, engine: ManagedEngine) -> None:
        """Brings an engine that was started again to what is pinned; without that it waits for the next pin."""
        async with self._lock:
            checkpoint, group = self._pinned, self._group
            if checkpoint is None or group is None:
                return
            there = await is_there(checkpoint.directory)  # a checkpoint of the user's may be gone
            if not there or engine.state is not EngineState.PENDING_WEIGHTS:
                return
            engine.move(EngineState.UPDATING, f"pinned to weights {checkpoint.version}")
            try:
                await _load(engine, checkpoint, group)
                await self._serve(group, [engine], checkpoint.version)
            except (EngineError, TimeoutError) as error:
                await group.quarantine(engine, f"it could not be pinned: {reason_of(error)}")

    async def _serve(self, group: EngineGroup, engines: Iterable[ManagedEngine], version: str) -> None:
        for engine in engines:
            if engine.state is not EngineState.UPDATING:
                raise EngineError(f"{engine.engine_id} is {engine.state}: {engine.failure}")
            engine.version = version
            engine.move(EngineState.SERVING, f"pinned to weights {version}")
        for engine in engines:
            await group.routing.add(engine)
        await group.routing.probe(version)

    async def _take_back(self, group: EngineGroup, engines: Iterable[ManagedEngine], reason: str) -> None:
        with anyio.CancelScope(shield=True):  # bounded by the router's deadline
            for engine in engines:
                await group.routing.remove(engine)
                if engine.state is EngineState.SERVING:
                    engine.move(EngineState.UPDATING, reason)
                if engine.state is EngineState.UPDATING:
                    engine.version = None
                    engine.move(EngineState.PENDING_WEIGHTS, reason)


async def _load(engine: ManagedEngine, checkpoint: _Checkpoint, group: EngineGroup) -> None:
    """Loads the checkpoint and reads back what the engine holds; raises EngineError.

    An engine that refuses keeps what it held. One that does not answer is taken out of service.
    """
    await group.routing.remove(engine)
    client = engine.client
    try:
        await client.abort_all()  # of an evaluation that was given up; else loading would wait for its last request
        await client.set_version(f"torn:{checkpoint.version}")
        await client.update_from_disk(str(checkpoint.directory), timeout_s=group.deadlines.load_s)
        await client.set_version(checkpoint.version)
        info = await client.model_info()
    except EngineRequestError as error:
        if error.status is None and engine.state is EngineState.UPDATING:
            await group.quarantine(engine, f"it could not be pinned: {error}")
        raise
    if (info.weight_version, info.model_path) != (checkpoint.version, str(checkpoint.directory)):
        raise EngineError(
            f"{engine.engine_id} holds weights {info.weight_version!r} of {info.model_path} after it was told to load "
            f"{checkpoint.version!r} of {checkpoint.directory}"
        )
