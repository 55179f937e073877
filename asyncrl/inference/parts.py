"""The parts of a started fleet, and the one function that wires them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from asyncrl.config import Config
from asyncrl.data.fleet import ACTOR
from asyncrl.inference.building import ServedModel
from asyncrl.inference.context import FleetContext
from asyncrl.inference.engines.capacity import Capacity
from asyncrl.inference.engines.group import EngineGroup
from asyncrl.inference.eval_fleet import EvalFleet
from asyncrl.inference.gpus.memory import Memory
from asyncrl.inference.gpus.shared_gpus import SharedGpus
from asyncrl.inference.models import FrozenModels
from asyncrl.inference.routing.routing import Routing
from asyncrl.inference.updates.catch_up import CatchUp, needs_publication
from asyncrl.inference.updates.copies_in_use import CopiesInUse
from asyncrl.inference.updates.deadlines import Deadlines
from asyncrl.inference.updates.state import UpdateState
from asyncrl.inference.updates.weight_updates import WeightUpdates


@dataclass(frozen=True, slots=True)
class FleetParts:
    """All engines of a job, and what changes them."""

    actor: EngineGroup
    """Serves the model that is trained."""
    models: FrozenModels
    eval_fleet: EvalFleet
    state: UpdateState
    updates: WeightUpdates
    copies: CopiesInUse
    capacity: Capacity
    memory: Memory

    @property
    def groups(self) -> list[EngineGroup]:
        """The groups of all models that are served, the trained one first."""
        on_demand = self.eval_fleet.group
        return [self.actor, *self.models.groups.values(), *([] if on_demand is None else [on_demand])]

    @property
    def needs_publication(self) -> bool:
        """See `FleetView.needs_publication`."""
        return needs_publication(self.actor.engines, self.state.published)

    async def start(self, context: FleetContext, model: ServedModel) -> None:
        """Starts routers and engines of the trained model and of the frozen ones; `model` is the trained one."""
        built = [await context.builder.engine(placement, model) for placement in context.layout.engines]
        self.actor.start_router()
        for engine, process in built:
            self.actor.start_engine(engine, process)
        for external in context.layout.external:
            self.actor.join_engine(context.builder.external(external), model.path, context.builder.owner)
        await self.models.start(model)


def trained_model(config: Config, path: Path) -> ServedModel:
    """The model in directory `path` as its engines serve it."""
    return ServedModel(ACTOR, path, config.engine, config.model.context_length)


async def wire_fleet(context: FleetContext, model: ServedModel) -> FleetParts:
    """Builds the parts of a fleet that serves `model`, the trained one; nothing is started yet.

    The order is that of their needs: an engine that catches up looks at the state of the updates and at the router, the
    group has its engines catch up, and updates, capacity and memory work on the group.

    Raises ConfigError for a router port that is taken.
    """
    config, events = context.config, context.events
    ranks = config.engine.tensor_parallel
    deadlines = await anyio.to_thread.run_sync(Deadlines.of_model, model.path, ranks)
    router, router_process = await context.builder.router(context.layout.router, config.router.port)
    state, routing, copies = UpdateState(), Routing(router), CopiesInUse()
    gpus = SharedGpus(config.train.step_timeout_s)
    catch_up = CatchUp(
        state,
        routing,
        gpus,
        copies=copies,
        deadlines=deadlines,
        verify=config.weights.verify != "never",
        events=events,
    )
    actor = EngineGroup(context, ACTOR, routing, router_process, catch_up.keep, deadlines=deadlines, gpus=gpus)
    return FleetParts(
        actor=actor,
        models=FrozenModels(context),
        eval_fleet=EvalFleet(context, model, state, copies),
        state=state,
        updates=WeightUpdates(actor, state, config.weights, events=events, task_group=context.task_group),
        copies=copies,
        capacity=Capacity(context, actor, model),
        memory=Memory(actor, state, gpus, device=context.layout.device, config=config),
    )
