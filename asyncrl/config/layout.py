"""What runs where in a job: trainer ranks, hosts, engines, routers and reward workers, each with its node. Only data.

`placement.rules` makes a layout from a configuration and a machine. A node is one machine of torchrun's gang, numbered
as torchrun numbers it. A GPU is named by its index among those that a job sees on its node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Device = Literal["cpu", "cuda"]
DType = Literal["float32", "bfloat16"]
Transport = Literal["broadcast", "tensor", "disk"]

DRIVER_NODE = 0
"""The node of rank 0. The driver, the routers and the reward workers run there."""


@dataclass(frozen=True, slots=True, order=True)
class Gpu:
    """One GPU of the job."""

    node: int
    index: int
    """Among the GPUs that the job sees on that node."""


@dataclass(frozen=True, slots=True)
class TrainerPlacement:
    """One trainer rank."""

    rank: int
    node: int
    local_rank: int
    gpu: int | None
    """Index of the rank's GPU on its node; None on CPU."""


@dataclass(frozen=True, slots=True)
class HostPlacement:
    """The host that starts and ends the processes of one node. It runs on CPU."""

    node: int


@dataclass(frozen=True, slots=True)
class RouterPlacement:
    """One router. It runs on CPU."""

    name: str
    """Name of its process."""
    node: int


@dataclass(frozen=True, slots=True)
class RewardPlacement:
    """The workers that run the reward function, all of them. They run on CPU."""

    workers: int
    node: int


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """One engine. All of its GPUs are on one node."""

    engine_id: str
    node: int
    tensor_parallel: int
    gpus: tuple[int, ...]
    """Indices on its node, one for each tensor-parallel rank; empty on CPU."""
    visible_devices: str
    """CUDA_VISIBLE_DEVICES of the engine's processes; empty on CPU."""
    transport: Transport
    """How new weights reach it."""
    trainer_ranks: tuple[int, ...] = ()
    """Trainer ranks on its GPUs, one for each tensor-parallel rank; empty where its GPUs are its own."""

    @property
    def colocated(self) -> bool:
        """Shares its GPUs with trainer ranks: it gives up memory while they train, and reads new weights in place."""
        return bool(self.trainer_ranks)

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """Its GPUs, with their node."""
        return tuple(Gpu(self.node, index) for index in self.gpus)


@dataclass(frozen=True, slots=True)
class ServedPlacement:
    """A model that is served beside the trained one: its engines and their router."""

    router: RouterPlacement
    engines: tuple[EnginePlacement, ...]


@dataclass(frozen=True, slots=True)
class ExternalEngine:
    """One engine that somebody else runs, wherever that is."""

    engine_id: str
    url: str
    transport: Transport


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads the computations of one process get on CPU."""

    trainer: int
    """A trainer rank that trains while no engine generates."""
    trainer_beside_engines: int
    """A trainer rank that trains while engines generate."""
    engine: int
    """A tensor-parallel rank of an engine that generates while no rank trains."""
    engine_beside_trainer: int
    """A tensor-parallel rank of an engine that generates while the trainer trains, or at any time."""
    small_engine: int
    """A rank of an engine whose model is small, at any time."""


@dataclass(frozen=True, slots=True)
class ProcessLayout:
    """All processes of a job."""

    device: Device
    dtype: DType
    """The numbers that trainer and engines compute with."""
    trainers: tuple[TrainerPlacement, ...]
    tensor_parallel: int
    """Trainer ranks that share one copy of the model."""
    engines: tuple[EnginePlacement, ...]
    """Engines of the trained model."""
    unused_gpus: tuple[Gpu, ...]
    gpu_names: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES calls each GPU of a node, by index. Nodes are alike."""
    external: tuple[ExternalEngine, ...] = ()
    beside: Mapping[str, ServedPlacement] = field(default_factory=dict)
    """Models that are not trained, by name; under `eval` the engines that only evaluate."""
    router: RouterPlacement = RouterPlacement("router", DRIVER_NODE)
    """The router of the trained model's engines."""
    rewards: RewardPlacement = RewardPlacement(0, DRIVER_NODE)
    hosts: tuple[HostPlacement, ...] = (HostPlacement(DRIVER_NODE),)
    """One for each node on which the job can start processes."""
    threads: Threads | None = None
    """On CPU; None on GPUs, where torch's own choice holds."""

    def trainer_threads(self, *, overlaps: bool) -> int | None:
        """With how many threads a trainer rank computes; None leaves it to torch.

        `overlaps`: engines generate while it trains.
        """
        if self.threads is None:
            return None
        return self.threads.trainer_beside_engines if overlaps else self.threads.trainer

    def engine_threads(self, engine_id: str, *, overlaps: bool, small: bool = False) -> int | None:
        """With how many threads a rank of this engine computes; None on GPUs.

        Engines that do not serve the trained model may have to answer at any time. `small`: the engine's model is.
        """
        if self.threads is None:
            return None
        if small:
            return self.threads.small_engine
        in_turn = not overlaps and any(engine.engine_id == engine_id for engine in self.engines)
        return self.threads.engine if in_turn else self.threads.engine_beside_trainer

    @property
    def transports(self) -> frozenset[Transport]:
        """Every way by which new weights must reach engines."""
        return frozenset([e.transport for e in self.engines] + [e.transport for e in self.external])

    @property
    def colocated(self) -> bool:
        """Whether any engine shares a GPU with a trainer rank."""
        return any(engine.colocated for engine in self.engines)

    @property
    def data_parallel(self) -> int:
        """Copies of the model that the trainer ranks hold."""
        return len(self.trainers) // self.tensor_parallel

    @property
    def nodes(self) -> int:
        """How many nodes the trainer ranks run on."""
        return self.trainers[-1].node + 1
