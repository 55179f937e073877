"""Models that are served beside the trained one and never change: each a group of engines behind its own router.

Invariants
- They have no version and take no part in weight updates. An engine of such a model serves as soon as it has generated,
  and is kept running as any other.
- A model that cannot be served any more ends the job, as the trained one does: tasks that ask it would wait in vain.
"""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from asyncrl.config.layout import ServedPlacement
from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError
from asyncrl.inference.building import ServedModel
from asyncrl.inference.context import FleetContext
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.engines.group import EngineGroup
from asyncrl.inference.routing.router_client import POLL_S
from asyncrl.inference.routing.routing import Routing
from asyncrl.observability.waits import waiting


class FrozenModels:
    """The groups of `[models.NAME]`."""

    def __init__(self, context: FleetContext) -> None:
        self._context = context
        self._groups: dict[str, EngineGroup] = {}

    @property
    def groups(self) -> Mapping[str, EngineGroup]:
        """By name; empty before `start`."""
        return self._groups

    async def start(self, default: ServedModel) -> None:
        """Starts them all; `default` is the trained model, as it is on disk."""
        for name, settings in self._context.config.models.items():
            path = settings.path or default.path
            model = ServedModel(name, path, settings, settings.context_length, frozen=True)
            self._groups[name] = await self._start_group(model, self._context.layout.beside[name])

    async def _start_group(self, model: ServedModel, placed: ServedPlacement) -> EngineGroup:
        builder = self._context.builder
        router, router_process = await builder.router(placed.router)
        built = [await builder.engine(placement, model) for placement in placed.engines]
        routing = Routing(router)

        async def serve(engine: ManagedEngine) -> None:
            engine.move(EngineState.SERVING, "its weights never change")
            try:
                await routing.add(engine)
            except EngineError as error:
                await engine.quarantine(str(error))

        group = EngineGroup(self._context, model.name, routing, router_process, serve)
        group.start_router()
        for engine, process in built:
            group.start_engine(engine, process)
        return group

    async def wait_answering(self, group: EngineGroup) -> None:
        """Returns when the model of `group` has answered through its router; raises EngineError when it cannot."""
        await group.wait_recovered()
        last = ""
        try:
            with waiting("answer", f"the router of {group.name}", self._context.config.router.start_timeout_s):
                while True:
                    try:
                        await group.routing.router.probe(None)
                        return
                    except EngineError as error:
                        last = str(error)
                    await anyio.sleep(POLL_S)
        except TimeoutError as error:
            raise EngineError(f"{error}; last: {last}") from error

    def url(self, name: str) -> str:
        """Url for requests to a model; raises EngineError for one that is not served."""
        group = self._groups.get(name)
        if group is None:
            known = ", ".join(self._groups) or "none"
            raise EngineError(f"no model is served as {name!r}; there are: {known} (each has a section [models.NAME])")
        return group.routing.router.url
