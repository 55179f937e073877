"""Capacity: single engines are stopped and started while the job runs.

Invariants
- An engine that is stopped first becomes DRAINING: unknown to the router at once, in no publication, its health still
  watched. It ends when it has no request left, when its time is up, or with its own death; none of these is a failure.
- A draining engine finishes its requests under the version that it serves: a publication that commits meanwhile passes
  it by, and no new request reaches it. So an answer may be of an older version, and its stamps say so. An engine that
  takes new requests never serves an older version.
- The last engine that serves is stopped only by force.
- An engine is started again only when its stop is complete.
"""

from __future__ import annotations

import anyio

from asyncrl.config.layout import EnginePlacement
from asyncrl.config.placement.rules import place_another
from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError
from asyncrl.inference.building import ServedModel
from asyncrl.inference.context import FleetContext
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.engines.group import EngineGroup
from asyncrl.inference.fleet_events import EngineStopped
from asyncrl.inference.sglang.engine_api import EngineRequestError
from asyncrl.observability.waits import WAITS, waiting

LOOK_S = 1.0
"""How long the engine itself waits for its last request before it answers that it is busy."""
PAUSE_S = 0.1
LOOKS = 2
"""Idle answers in a row that count: a request may have left the router while the engine was taken out."""
SETTLE_GRACE_S = 10.0
"""Beside `engine.drain_timeout_s`, for a stop that another task carries out."""


class Capacity:
    """Starts and stops single engines of a group."""

    def __init__(self, context: FleetContext, group: EngineGroup, model: ServedModel) -> None:
        """New engines of `group` serve `model`, as the others do."""
        self._context = context
        self._config = context.config
        self._group = group
        self._model = model
        self._placements = {placement.engine_id: placement for placement in context.layout.engines}
        self._starting = anyio.Lock()

    async def start(self, engine_id: str | None = None) -> str:
        """Starts an engine that was stopped or given up, or the next new one; returns its id.

        None chooses the first engine that can be started again, or a new one where there is none. Raises EngineError
        when the engine cannot be started.
        """
        async with self._starting:  # one at a time: each new engine takes GPUs that the others left
            return await self._start(engine_id)

    async def _start(self, engine_id: str | None) -> str:
        self._group.check()
        if engine_id is None:
            idle = (engine.engine_id for engine in self._group.engines if self._can_start(engine))
            engine_id = next(idle, self._next_id)
        engine = self._find(engine_id)
        if engine is None:
            placement = self._place(engine_id)
            built = await self._context.builder.engine(placement, self._model)
            self._group.check()
            self._group.start_engine(*built)
            self._placements[engine_id] = placement
        elif self._group.is_wanted(engine) or engine.state is EngineState.DRAINING:
            raise EngineError(f"{engine_id} cannot be started: it is {engine.state}")
        elif not self._group.is_over(engine):
            raise EngineError(f"{engine_id} cannot be started: it is being stopped; start it when it is stopped")
        else:
            self._refuse_colocated(engine)
            self._group.start_again(engine)
        return engine_id

    async def stop(self, engine_id: str, *, force: bool = False) -> None:
        """Returns when the engine is STOPPED; raises EngineError when it must not be stopped.

        It may take until the end of a weight update (`weights.lease_timeout_s`), then `engine.drain_timeout_s`.
        """
        engine = self._find(engine_id)
        if engine is None:
            raise EngineError(f"there is no engine {engine_id}; there are {self._names()}")
        self._refuse_colocated(engine)
        began = anyio.current_time()
        if self._group.is_wanted(engine):
            await self._settle(engine)
            self._check_last(engine, force)
            drained = True
            try:
                await self._group.retire_engine(engine)
                if engine.state is EngineState.DRAINING:
                    drained = await drain(engine, self._config.engine.drain_timeout_s)
            finally:
                with anyio.CancelScope(shield=True):  # bounded; a retired engine must not live on
                    await self._group.stop_engine(engine)
            seconds = anyio.current_time() - began
            self._context.events.emit(EngineStopped(engine=engine_id, seconds=seconds, drained=drained))
        elif engine.state is EngineState.DRAINING:  # another call is stopping it
            with waiting("last request", engine_id, self._config.engine.drain_timeout_s + SETTLE_GRACE_S):
                await self._group.wait_until(lambda: engine.state is EngineState.STOPPED)
        else:
            await self._group.stop_engine(engine)

    async def _settle(self, engine: ManagedEngine) -> None:
        """Waits while the engine takes weights: ending it then would disturb the others' transfer."""
        try:
            with waiting("end of its weight update", engine.engine_id, self._config.weights.lease_timeout_s):
                await self._group.wait_until(lambda: engine.state is not EngineState.UPDATING)
        except TimeoutError as error:
            raise EngineError(f"{engine.engine_id} was not stopped: {error}") from error
        self._group.check()

    def _check_last(self, engine: ManagedEngine, force: bool) -> None:
        others = [other for other in self._group.engines if other is not engine and self._group.is_wanted(other)]
        if engine.serves:
            others = [other for other in others if other.serves]
        if not others and not force:
            raise EngineError(
                f"{engine.engine_id} was not stopped: it is the last engine that serves ({self._group.states()}); "
                "start another one first, or stop it by force"
            )

    def _place(self, engine_id: str) -> EnginePlacement:
        if engine_id != self._next_id:
            raise EngineError(f"there is no engine {engine_id}; there are {self._names()}, and {self._next_id} is next")
        taken = {gpu for placement in self._placements.values() for gpu in placement.devices}
        return place_another(self._config, self._context.layout, engine_id, taken)

    @property
    def _next_id(self) -> str:
        return f"engine-{len(self._placements)}"

    def _can_start(self, engine: ManagedEngine) -> bool:
        return self._group.is_over(engine) and not self._group.is_wanted(engine) and not engine.endpoint.colocated

    def _refuse_colocated(self, engine: ManagedEngine) -> None:
        if engine.endpoint.colocated:
            raise EngineError(
                f"{engine.engine_id} shares its GPUs with the trainer, whose memory is laid out around it; only "
                "engines with GPUs of their own are started and stopped while a job runs"
            )

    def _find(self, engine_id: str) -> ManagedEngine | None:
        return next((engine for engine in self._group.engines if engine.engine_id == engine_id), None)

    def _names(self) -> str:
        return ", ".join(engine.engine_id for engine in self._group.engines) or "none"


async def drain(engine: ManagedEngine, timeout_s: float) -> bool:
    """Waits at most `timeout_s` for the engine to finish its requests; returns whether it did.

    It is asked to flush its cache, which its scheduler refuses while it has any request. (The numbers of /v1/loads lag
    behind by up to 15 decoding steps.)
    """
    idle = 0
    with WAITS.register("last request", engine.engine_id, timeout_s), anyio.move_on_after(timeout_s):
        while engine.state is EngineState.DRAINING:
            try:
                await engine.client.flush_cache(idle_timeout_s=LOOK_S)
                idle += 1
            except EngineRequestError:  # 400: it is busy. Else it hangs or died: health probes or its keeper find out
                idle = 0
            if idle == LOOKS:
                return True
            await anyio.sleep(PAUSE_S)
    return False
