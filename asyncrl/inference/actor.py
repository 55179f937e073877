"""The engines of the model that is trained, and all that brings weights and memory to them.

They know each other (catching up needs the updates, these the group, and that what catches up), so they are built here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyio.abc import TaskGroup

from asyncrl.config import Config
from asyncrl.config.layout import ProcessLayout
from asyncrl.data.fleet import ACTOR
from asyncrl.host import ProcessSpec
from asyncrl.inference.building import Builder, ServedModel
from asyncrl.inference.engines.capacity import Capacity
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.engines.group import EngineGroup
from asyncrl.inference.gpus.memory import Memory
from asyncrl.inference.gpus.shared_gpus import SharedGpus
from asyncrl.inference.routing.routing import Routing
from asyncrl.inference.updates.catch_up import CatchUp
from asyncrl.inference.updates.copies_in_use import CopiesInUse
from asyncrl.inference.updates.deadlines import Deadlines
from asyncrl.inference.updates.weight_updates import WeightUpdates
from asyncrl.observability.events import EventLog

if TYPE_CHECKING:
    from asyncrl.host import EngineHost


@dataclass(frozen=True, slots=True)
class ActorParts:
    """What exists once the fleet was started."""

    actor: EngineGroup
    updates: WeightUpdates
    capacity: Capacity
    memory: Memory
    task_group: TaskGroup
    model: ServedModel


def build_actor(
    config: Config,
    layout: ProcessLayout,
    builder: Builder,
    *,
    host: EngineHost,
    routing: Routing,
    router_spec: ProcessSpec,
    model: ServedModel,
    deadlines: Deadlines,
    copies: CopiesInUse,
    events: EventLog,
    task_group: TaskGroup,
) -> ActorParts:
    """Nothing of it is started yet."""
    gpus = SharedGpus(config.train.step_timeout_s)

    async def catch_up(engine: ManagedEngine) -> None:
        await follower.keep(engine)

    group = EngineGroup(
        ACTOR,
        config,
        host=host,
        routing=routing,
        router_spec=router_spec,
        events=events,
        task_group=task_group,
        catch_up=catch_up,
        gpus=gpus,
        deadlines=deadlines,
    )
    updates = WeightUpdates(
        group.engines,
        routing,
        config.weights,
        deadlines,
        quarantine=group.quarantine,
        events=events,
        task_group=task_group,
    )
    follower = CatchUp(
        updates,
        verify=config.weights.verify != "never",
        quarantine=group.quarantine,
        copies=copies,
        gpus=gpus,
        events=events,
    )
    capacity = Capacity(
        group,
        config,
        layout,
        build=lambda placement: builder.engine(placement, model),
        events=events,
    )
    memory = Memory(group, updates, gpus, device=layout.device, config=config)
    return ActorParts(group, updates, capacity, memory, task_group, model)
