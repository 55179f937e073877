"""What the controller tells others about its engines: addresses and versions as frozen data.

Nothing here can reach an engine's process; whoever holds one of these can only talk to its url.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
"""Request header by which a router of policy `manual` or `consistent_hashing` keeps requests together. It passes it on
to the engine, which ignores it."""


def routing_key(sticky: Literal["off", "group", "sample"], sample_id: str) -> str | None:
    """Value of that header for a request of sample `sample_id` (`group.index`); None where none is to be sent.

    A conversation is a sample: all its turns carry the same key (what is sent again after a failure of the engine
    excepted, which is to go elsewhere).
    """
    if sticky == "off":
        return None
    return sample_id.rpartition(".")[0] if sticky == "group" else sample_id


ACTOR = "actor"
"""Name of the model that is trained."""


class EngineState(StrEnum):
    """Where an engine stands in its life (design section 4)."""

    STARTING = "starting"
    PENDING_WEIGHTS = "pending_weights"
    SERVING = "serving"
    UPDATING = "updating"
    OFFLOADED = "offloaded"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    STOPPED = "stopped"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """One engine as a peer of the weight transfer sees it."""

    engine_id: str
    generation: int
    """Counts the processes that bore this id; an ack from an older one is void."""
    url: str
    tensor_parallel: int
    gpus: tuple[int, ...] = ()
    """GPUs of the engine; empty on CPU."""
    colocated: bool = False
    """Shares its GPUs with trainer ranks: weights go by tensor handover."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    endpoint: EngineEndpoint
    state: EngineState
    version: str | None
    """Published version that the engine holds; None before the first, and of a model that never changes."""
    model: str = ACTOR
    """What it serves: the trained model, one of [models.NAME], or `eval`."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """A snapshot of the fleet."""

    router_url: str
    published_version: str | None
    engines: tuple[EngineStatus, ...]
    """Those of the trained model first."""
    model_urls: Mapping[str, str] = field(default_factory=dict)
    """Routers of models that never change, by name."""
    metrics_urls: Mapping[str, str] = field(default_factory=dict)
    """Where Prometheus reads the numbers of each router, by the name of the model that it serves."""
    needs_publication: bool = False
    """All engines lost the published weights, and no copy is left that they could load: only a publication of the
    trainer's weights (of the same version, where it holds the same) makes them serve again."""

    @property
    def serves(self) -> bool:
        """Whether an engine of the trained model generates."""
        return any(status.model == ACTOR and status.state is EngineState.SERVING for status in self.engines)


@dataclass(frozen=True, slots=True)
class EvalFleetInfo:
    """Engines that only evaluate, all of which hold one checkpoint."""

    router_url: str
    version: str
    """Of the checkpoint; every token that they make is stamped with it."""
    engine_urls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UpdateLease:
    """The right to bring `engines` to `version`: they are paused and stamped torn until commit or abort."""

    lease_id: str
    version: str
    paused_at: float
    """Monotonic time (anyio.current_time) at which the first engine stopped generating."""
    deadline: float
    """Monotonic time (anyio.current_time) after which the controller takes the engines back."""
    engines: tuple[EngineEndpoint, ...]
    settle_s: float
    """Longest that the controller takes to commit the lease, or to take the engines back: it goes by their weights."""


@dataclass(frozen=True, slots=True)
class UpdateAck:
    """One engine received all of a publication."""

    engine_id: str
    generation: int
