"""Carries out requests to a running job that concern its engines: `asyncrl cell`, `asyncrl health`."""

from __future__ import annotations

from asyncrl.control.protocol import (
    Answer,
    CarriedOut,
    EngineRow,
    Health,
    Request,
    SetProbing,
    ShowHealth,
    StartCell,
    StopCell,
)
from asyncrl.data.fleet import FleetView
from asyncrl.errors import EngineError
from asyncrl.inference.controller import InferenceController
from asyncrl.inference.engines.lifecycle import ROUTABLE


class EngineCommands:
    """The handler of a job with engines."""

    def __init__(self, controller: InferenceController) -> None:
        self._controller = controller

    async def __call__(self, request: Request) -> Answer:
        """Carries `request` out; raises EngineError when the controller refuses it."""
        match request:
            case StartCell(engine, wait):
                return await self._start(engine, wait)
            case StopCell(engine, force):
                await self._controller.stop_cell(engine, force=force)
                return CarriedOut(f"{engine} is stopped")
            case SetProbing(paused=True):
                await self._controller.health_monitoring_pause()
                return CarriedOut("engines are not probed until they are resumed (asyncrl health resume)")
            case SetProbing():
                await self._controller.health_monitoring_resume()
                return CarriedOut("engines are probed again")
            case ShowHealth():
                return health_of(self._controller.fleet(), probes_paused=self._controller.statistics().health_paused)

    async def _start(self, engine: str | None, wait: bool) -> CarriedOut:
        started = await self._controller.start_cell(engine)
        if not wait:
            return CarriedOut(f"{started} is starting; it serves once it has the published weights")
        await self._controller.recover_updatable_engines()
        states = {status.endpoint.engine_id: status.state for status in self._controller.fleet().engines}
        if states[started] not in ROUTABLE:
            raise EngineError(f"{started} did not come to serve: it is {states[started]}; the job's log says why")
        return CarriedOut(f"{started} serves")


def health_of(view: FleetView, *, probes_paused: bool) -> Health:
    """The state of all engines, as the answer to `ShowHealth`."""
    rows = (
        EngineRow(
            engine=status.endpoint.engine_id,
            model=status.model,
            state=status.state.value,
            version=status.version,
            restarts=status.endpoint.generation,
            url=status.endpoint.url,
        )
        for status in view.engines
    )
    return Health(tuple(rows), view.published_version, probes_paused)


async def refuse_without_engines(request: Request) -> Answer:
    """The handler of half a job that replays saved rollouts; raises EngineError."""
    raise EngineError("this job runs without engines (debug.train_only)")
