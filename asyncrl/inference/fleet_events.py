"""The events of the inference side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.data.fleet import ACTOR
from asyncrl.observability.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStateChanged(Event):
    """An engine changed its state."""

    kind: ClassVar[str] = "engine_state"
    engine: str
    generation: int
    previous: str
    state: str
    version: str | None
    model: str = ACTOR
    """The model that the engine serves."""
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExited(Event):
    """An engine's process ended, and no one had asked it to."""

    kind: ClassVar[str] = "engine_exited"
    engine: str
    generation: int
    pid: int
    returncode: int
    log_tail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRestarting(Event):
    """An engine or a router that ended will be started again."""

    kind: ClassVar[str] = "process_restarting"
    name: str
    restarts: int
    """Restarts within the window that counts, this one included."""
    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGivenUp(Event):
    """An engine or a router ended once too often and is not started again."""

    kind: ClassVar[str] = "process_given_up"
    name: str
    restarts: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCaughtUp(Event):
    """An engine that joined late loaded the published weights and serves."""

    kind: ClassVar[str] = "engine_caught_up"
    engine: str
    generation: int
    version: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStopped(Event):
    """An engine was taken out of service on request."""

    kind: ClassVar[str] = "engine_stopped"
    engine: str
    seconds: float
    """From the request to its end."""
    drained: bool
    """Whether it finished the requests that it had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalFleetPinned(Event):
    """The engines that only evaluate hold a checkpoint; each of them has said so."""

    kind: ClassVar[str] = "eval_fleet_pinned"
    version: str
    engines: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRestarted(Event):
    """A new router answers and knows the engines of the old one."""

    kind: ClassVar[str] = "router_restarted"
    router: str
    engines: int
    seconds: float
    """From the end of the old router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReady(Event):
    """Router and engines of a model have answered; engines of the trained model wait for weights."""

    kind: ClassVar[str] = "fleet_ready"
    model: str = ACTOR
    engines: int
    seconds: float
    """From start to the last engine's first generation."""
    router_url: str
    metrics_url: str
    """Url of the router's figures for Prometheus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateBegun(Event):
    """Engines are paused and stamped torn."""

    kind: ClassVar[str] = "weight_update_begun"
    lease: str
    version: str
    engines: tuple[str, ...]
    seconds: float
    """From the call to the lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateCommitted(Event):
    """Engines serve `version`."""

    kind: ClassVar[str] = "weight_update_committed"
    lease: str
    version: str
    engines: tuple[str, ...]
    paused_s: float
    """Seconds without generation: from the first pause to the last resumption."""
    verified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdateAborted(Event):
    """A publication was given up; its engines are out of the router until the next one, unless `restored`."""

    kind: ClassVar[str] = "weight_update_aborted"
    lease: str
    version: str
    reason: str
    restored: bool
