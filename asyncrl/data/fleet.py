"""Frozen records in which the controller tells other parts about its engines: addresses, states, versions.

None of them gives access to an engine's process. The holder of a record can only send requests to the engine's URL.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Literal

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
"""Request header by which a router of policy `manual` or `consistent_hashing` sends requests to the same engine. The
router passes the header on; the engine ignores it."""


def routing_key(sticky: Literal["off", "group", "sample"], sample_id: str) -> str | None:
    """Returns the routing key for a request of sample `sample_id` (`group.index`); None to send no header.

    A conversation is one sample, so all its turns carry the same key. After a failure the client changes the key, so
    that the request may reach another engine.
    """
    if sticky == "off":
        return None
    return sample_id.rpartition(".")[0] if sticky == "group" else sample_id


def stamp_of(version: str, engine_id: str, owner: str | None = None) -> str:
    """Returns what engine `engine_id` stamps on the tokens that weights `version` make: `0.3@engine-1`.

    `owner`: name of the job, on an engine that outlives it (`job_name`). Two jobs that use such an engine both count
    0.0, 0.1, ..., and neither may take the other's weights for its own.
    """
    return f"{version}@{engine_id}" + ("" if owner is None else f"@{owner}")


def job_name(run_dir: Path) -> str:
    """Name of a job on engines that outlive it: `host:/absolute/run/directory`, the same for every attempt of a run."""
    return f"{socket.gethostname()}:{run_dir.absolute()}"


def owner_in(stamp: str) -> str | None:
    """Returns the name of the job in a stamp; None if it bears none."""
    parts = stamp.split("@", 2)
    return parts[2] if len(parts) == 3 else None


@lru_cache(maxsize=4096)
def read_stamp(stamp: str, owner: str | None = None) -> tuple[str, str]:
    """Returns version and engine id of a stamp; the id is empty for a stamp that this program did not set.

    The whole stamp stands for the version where another job than `owner` set it: it is no version of this job.
    """
    version, _, rest = stamp.partition("@")
    engine_id, _, name = rest.partition("@")
    return (stamp if name and name != owner else version), engine_id


ACTOR = "actor"
"""Name of the model that the job trains."""


class EngineState(StrEnum):
    """State of an engine; `inference/engines/lifecycle.py` has the transitions."""

    STARTING = "starting"  # the process runs and does not answer yet
    PENDING_WEIGHTS = "pending_weights"  # it answers, and lacks the published weights
    SERVING = "serving"  # it generates
    UPDATING = "updating"  # paused for a weight update
    OFFLOADED = "offloaded"  # its GPU memory is released to the trainer
    DRAINING = "draining"  # it finishes its requests and gets no new ones
    QUARANTINED = "quarantined"  # it failed, and the controller is ending its process
    STOPPED = "stopped"  # ended on request
    DEAD = "dead"  # its process ended, or could not be started


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """Address of one engine, for the weight transfer."""

    engine_id: str
    """Name, as in logs: `engine-0`."""
    generation: int
    """Number of processes started under this id so far; an ack from an older process is void."""
    url: str
    """HTTP address of the engine itself, not of the router."""
    tensor_parallel: int
    """Tensor-parallel ranks of the engine."""
    gpus: tuple[int, ...] = ()
    """GPUs of the engine; empty on CPU."""
    trainer_ranks: tuple[int, ...] = ()
    """Trainer ranks on its GPUs, one for each tensor-parallel rank; empty where its GPUs are its own."""
    external: bool = False
    """True if somebody else runs the engine; then it goes on after the job."""

    @property
    def colocated(self) -> bool:
        """True if the engine shares its GPUs with trainer ranks; then it reads new weights in place."""
        return bool(self.trainer_ranks)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine with its state and weights, at one moment."""

    endpoint: EngineEndpoint
    state: EngineState
    version: str | None
    """Published version that the engine holds; None before the first one, and for a model whose weights are fixed."""
    model: str = ACTOR
    """Model that it serves: the trained one, one of [models.NAME], or `eval`."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """A snapshot of the fleet."""

    router_url: str
    """Router of the trained model."""
    published_version: str | None
    """Latest version that was published; None before the first publication."""
    engines: tuple[EngineStatus, ...]
    """All engines, those of the trained model first."""
    model_urls: Mapping[str, str] = field(default_factory=dict)
    """Routers of the models whose weights are fixed, by model name."""
    metrics_urls: Mapping[str, str] = field(default_factory=dict)
    """Prometheus endpoint of each router, by model name."""
    needs_publication: bool = False
    """True if every engine lost the published weights and no copy is left to load. The engines serve again only when
    the trainer publishes its weights again (as the same version, if it still holds that one)."""

    @property
    def serves(self) -> bool:
        """True if at least one engine of the trained model generates."""
        return any(status.model == ACTOR and status.state is EngineState.SERVING for status in self.engines)


@dataclass(frozen=True, slots=True)
class EvalFleetInfo:
    """What only evaluates: engines that all hold the weights of one checkpoint, or the checkpoint alone."""

    router_url: str
    """Router in front of the engines."""
    version: str
    """Version of the checkpoint; the engines stamp every token with it."""
    engine_urls: tuple[str, ...]
    """Addresses of the engines themselves; empty where `eval.function` evaluates."""
    directory: Path | None = None
    """The checkpoint, as safetensors with Hugging Face names; it stays as it is until the next one is pinned."""


PinEvalFleet = Callable[[Path | None], Awaitable[EvalFleetInfo]]
"""How an executor asks for the engines that only evaluate: they hold the checkpoint in this directory then, or the
published weights (None). Argument and result are data. Raises EngineError where that cannot be."""


DistrustEngine = Callable[[str, str], None]
"""How an executor tells that an engine (its id) should not serve, and why: its answers cannot be believed. Returns at
once."""


@dataclass(frozen=True, slots=True)
class UpdateLease:
    """The right to bring `engines` to `version`. They stay paused and stamped as torn until commit or abort."""

    lease_id: str
    """Unique in the job: `lease-3`."""
    version: str
    """Version that the engines get."""
    paused_at: float
    """Monotonic time (anyio.current_time) at which the first engine stopped generating."""
    deadline: float
    """Monotonic time (anyio.current_time) after which the controller takes the engines back."""
    engines: tuple[EngineEndpoint, ...]
    """Engines that take part."""
    settle_s: float
    """Longest time, in seconds, that the controller needs to commit the lease or to take the engines back. It grows
    with the size of the weights."""


@dataclass(frozen=True, slots=True)
class UpdateAck:
    """Confirms that one engine received all weights of a publication."""

    engine_id: str
    """Engine that confirms."""
    generation: int
    """Its `EngineEndpoint.generation`."""
