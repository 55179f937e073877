"""The engines that only evaluate: started when they are first needed, pinned to one checkpoint at a time.

Where a function of the user's own evaluates (`eval.function`), there are no engines, and a pin keeps the checkpoint.

Invariants
- No engine of it serves anything but the pinned checkpoint: one that is started again loads that first, and after a pin
  that fails no engine serves.
- A pin counts when every engine has said, after loading, which version it holds, and the router has answered with that
  version. Until then nothing is evaluated.
- The pinned checkpoint is in use until the next pin, and its files stay: an engine that is started again reads them.
- Every failure here is an EngineError for the caller, never the end of the job. A fleet that failed is started anew by
  the next pin.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from asyncrl.config.checks.served import EVAL
from asyncrl.data.fleet import EngineState, EvalFleetInfo
from asyncrl.errors import EngineError
from asyncrl.inference.building import ServedModel
from asyncrl.inference.context import FleetContext
from asyncrl.inference.engines.engine import ManagedEngine, on_each, reason_of
from asyncrl.inference.engines.group import EngineGroup
from asyncrl.inference.fleet_events import EvalFleetPinned
from asyncrl.inference.routing.routing import Routing
from asyncrl.inference.sglang.engine_api import EngineRequestError
from asyncrl.inference.updates.copies_in_use import CopiesInUse, Published, is_there
from asyncrl.inference.updates.deadlines import Deadlines
from asyncrl.inference.updates.participants import complaints
from asyncrl.inference.updates.state import UpdateState


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    directory: Path
    version: str

    @classmethod
    def of(cls, directory: Path, version: str | None) -> _Checkpoint:
        """Without a version it is known by the name of its directory, in characters that a stamp may have."""
        absolute = directory.absolute()
        return cls(absolute, version or re.sub(r"[^\w.-]", "_", absolute.name))


class EvalFleet:
    """The group of `eval.fleet`."""

    def __init__(self, context: FleetContext, model: ServedModel, state: UpdateState, copies: CopiesInUse) -> None:
        """`model` is the trained one; `state` knows its published weights, and `copies` keeps the pinned ones."""
        self._context = context
        self._model = model
        self._state = state
        self._copies = copies
        self._group: EngineGroup | None = None
        self._pinned: _Checkpoint | None = None
        self._holding = ExitStack()
        """Keeps the pinned checkpoint in use."""
        self._lock = anyio.Lock()
        self._closed = False

    def close(self) -> None:
        """Nothing is started from now on."""
        self._closed = True

    @property
    def group(self) -> EngineGroup | None:
        """None until the first pin."""
        return self._group

    async def pin(self, hf_dir: Path | None, version: str | None) -> EvalFleetInfo:
        """Brings every engine to the checkpoint in `hf_dir` (Hugging Face names), to be known as `version`.

        None of both: to the published weights. Starts the fleet if it does not run. A checkpoint without a version is
        known by the name of its directory.

        Raises EngineError when there is no such fleet or nothing to evaluate, and when an engine cannot be brought
        there in two attempts; then none serves.
        """
        if hf_dir is not None:
            checkpoint = _Checkpoint.of(hf_dir, version)
        else:
            published = await self._published()
            if published is None or published.directory is None:
                raise EngineError(
                    "there is no copy of published weights to evaluate; set weights.keep_published to always, or give "
                    "a checkpoint"
                )
            checkpoint = _Checkpoint(published.directory, version or published.version)
        with self._copies.held(checkpoint.directory):  # from now on, also while another pin is under way
            return await self._pin(checkpoint)

    async def _published(self) -> Published | None:
        """The published weights once their copy is written. One that newer weights overtook is not waited for."""
        await self._state.wait_copy()
        while (published := self._state.published) is not None and published.directory is None:
            if not self._state.under_way:
                break
            await self._state.next_end(self._state.ends)
            await self._state.wait_copy()
        return published

    async def _pin(self, checkpoint: _Checkpoint) -> EvalFleetInfo:
        async with self._lock:
            began = anyio.current_time()
            self._pinned = None
            self._holding.close()
            if self._context.config.eval.function is not None:
                self._keep(checkpoint)
                return EvalFleetInfo("", checkpoint.version, (), checkpoint.directory)
            group = await self._started()
            for last in (False, True):
                try:
                    engines = await self._try(group, checkpoint)
                    break
                except EngineError:
                    group.check()
                    if last:
                        raise
            self._keep(checkpoint)
            urls = tuple(engine.endpoint.url for engine in engines)
            seconds = anyio.current_time() - began
            self._context.events.emit(EvalFleetPinned(version=checkpoint.version, engines=len(urls), seconds=seconds))
            return EvalFleetInfo(group.routing.router.url, checkpoint.version, urls, checkpoint.directory)

    def _keep(self, checkpoint: _Checkpoint) -> None:
        self._pinned = checkpoint
        self._holding.enter_context(self._copies.held(checkpoint.directory))

    async def _try(self, group: EngineGroup, checkpoint: _Checkpoint) -> list[ManagedEngine]:
        """Waits for engines that start, and brings all that are wanted to the checkpoint; raises EngineError."""
        await group.wait_ready()
        await group.wait_updatable(len(group.engines), f"an evaluation of weights {checkpoint.version}")
        engines = [engine for engine in group.engines if group.is_wanted(engine)]
        for engine in engines:
            engine.move(EngineState.UPDATING, f"to be pinned to weights {checkpoint.version}")
        try:
            failed = await on_each(engines, lambda engine: _load(engine, checkpoint, group))
            if failed:
                raise EngineError(f"weights {checkpoint.version} cannot be evaluated: {complaints(failed)}")
            await self._serve(group, engines, checkpoint.version)
        except BaseException as error:
            await self._take_back(group, engines, reason_of(error))
            raise
        return engines

    async def _started(self) -> EngineGroup:
        """The group, started if it was not, and started over if it has failed; raises EngineError."""
        context = self._context
        settings = context.config.eval.fleet
        if settings is None:
            raise EngineError("there are no engines for evaluation only; add a section [eval.fleet]")
        if self._group is not None:
            await self._group.start_over()
            return self._group
        deadlines = await anyio.to_thread.run_sync(Deadlines.of_model, self._model.path, settings.tensor_parallel)
        placed = context.layout.beside[EVAL]
        served = ServedModel(EVAL, self._model.path, settings, self._model.context_length)
        router, router_process = await context.builder.router(placed.router)
        built = [await context.builder.engine(placement, served) for placement in placed.engines]
        if self._closed:
            raise EngineError("the fleet has been disposed of")
        self._group = group = EngineGroup(
            context, EVAL, Routing(router), router_process, self._follow, deadlines=deadlines, essential=False
        )
        group.start_router()
        for engine, process in built:
            group.start_engine(engine, process)
        return group

    async def _follow(self, engine: ManagedEngine) -> None:
        """Brings an engine that was started again to the pinned checkpoint; without one it waits for the next pin."""
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
                await engine.quarantine(f"it could not be pinned: {reason_of(error)}")

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
    """Loads the checkpoint and reads back which one the engine holds; raises EngineError.

    An engine that refuses keeps its weights. One that does not answer is taken out of service.
    """
    await group.routing.remove(engine)
    client = engine.client
    try:
        await client.abort_all()  # loading would wait for requests of an evaluation that was given up
        await client.set_version(f"torn:{checkpoint.version}")
        await client.update_from_disk(str(checkpoint.directory), timeout_s=group.deadlines.load_s)
        await client.set_version(checkpoint.version)
        info = await client.model_info()
    except EngineRequestError as error:
        if error.status is None and engine.state is EngineState.UPDATING:
            await engine.quarantine(f"it could not be pinned: {error}")
        raise
    if (info.weight_version, info.model_path) != (checkpoint.version, str(checkpoint.directory)):
        raise EngineError(
            f"{engine.engine_id} holds weights {info.weight_version!r} of {info.model_path} after it was told to load "
            f"{checkpoint.version!r} of {checkpoint.directory}"
        )
