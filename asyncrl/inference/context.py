"""What all parts of the inference side share."""

from __future__ import annotations

from dataclasses import dataclass

from anyio.abc import TaskGroup

from asyncrl.config import Config
from asyncrl.config.layout import ProcessLayout
from asyncrl.inference.building import Builder
from asyncrl.inference.engines.health import HealthMonitoring
from asyncrl.observability.events import EventLog


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetContext:
    """The job's settings and services, as a started controller hands them to its parts."""

    config: Config
    layout: ProcessLayout
    builder: Builder
    """Makes engines and routers ready to start, each with the host of its node."""
    events: EventLog
    monitoring: HealthMonitoring
    task_group: TaskGroup
    """Runs all tasks that keep the fleet. A failure that ends the job is raised into it."""
