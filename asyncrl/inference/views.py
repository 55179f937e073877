"""Frozen snapshots of a started fleet, for others to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.data.fleet import FleetView
from asyncrl.inference.engines.group import EngineGroup
from asyncrl.inference.parts import FleetParts


@dataclass(frozen=True, slots=True)
class InferenceStatistics:
    """What the controller has counted."""

    engines: Mapping[str, int]
    """State → engines in it, of the trained model."""
    beside: Mapping[str, Mapping[str, int]]
    """The same of other models, by name."""
    published_version: str | None
    open_lease: str | None
    """Id of the lease under which engines take weights now."""
    updates_committed: int
    updates_aborted: int
    restarts: int
    """Of engines and routers."""
    paused_s: float
    """Seconds without generation over all committed updates."""
    start_s: float | None
    """From `start` to the last engine's first generation; None before."""
    health_paused: bool
    """Whether no engine is probed."""


def view_of(parts: FleetParts) -> FleetView:
    """Addresses, states and versions as they are now."""
    return FleetView(
        router_url=parts.actor.routing.router.url,
        published_version=parts.state.version,
        engines=tuple(engine.status for group in parts.groups for engine in group.engines),
        model_urls={name: group.routing.router.url for name, group in parts.models.groups.items()},
        metrics_urls={group.name: group.routing.router.metrics_url for group in parts.groups},
        needs_publication=parts.needs_publication,
    )


def statistics_of(parts: FleetParts, *, health_paused: bool) -> InferenceStatistics:
    """The counts so far."""
    lease, updates = parts.state.open_lease, parts.updates
    actor, *others = parts.groups
    return InferenceStatistics(
        engines=_states(actor),
        beside={group.name: _states(group) for group in others},
        published_version=parts.state.version,
        open_lease=None if lease is None else lease.lease_id,
        updates_committed=updates.committed,
        updates_aborted=updates.aborted,
        restarts=sum(group.restarts for group in parts.groups),
        paused_s=updates.paused_s,
        start_s=actor.start_s,
        health_paused=health_paused,
    )


def _states(group: EngineGroup) -> dict[str, int]:
    return dict(Counter(engine.state.value for engine in group.engines))
