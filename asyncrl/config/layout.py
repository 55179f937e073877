"""Which process runs where: trainer ranks, engines, router, host. A pure function of config and machine.

Invariants
- Engines get the GPUs that no trainer rank uses. They share GPUs with the trainer only where the user asked for it
  (`engine.colocate`) or where there is a single GPU, and then an engine shares all of its GPUs or none.
- A layout that cannot work is refused here, before anything starts.
- The whole job runs on one kind of device: on GPUs when it sees any, else on CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from asyncrl.config.checks.served import gpus_beside, served_beside
from asyncrl.config.machine import Machine
from asyncrl.config.problems import InvalidConfigError, Problem
from asyncrl.config.root import Config
from asyncrl.errors import EngineError

Device = Literal["cpu", "cuda"]
DType = Literal["float32", "bfloat16"]
Transport = Literal["broadcast", "tensor", "disk"]


@dataclass(frozen=True, slots=True)
class TrainerPlacement:
    """One trainer rank."""

    rank: int
    node: int
    local_rank: int
    gpu: int | None
    """Visible GPU of the rank on its node; None on CPU."""


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """One engine, on the node of rank 0."""

    engine_id: str
    tensor_parallel: int
    gpus: tuple[int, ...]
    """Visible GPUs by index, one per tensor-parallel rank; empty on CPU."""
    visible_devices: str
    """Value of CUDA_VISIBLE_DEVICES for the engine's processes; empty on CPU."""
    colocated: bool
    """Shares its GPUs with trainer ranks: offloaded around training, weights by tensor handover."""
    transport: Transport
    """How new weights reach it."""


@dataclass(frozen=True, slots=True)
class ExternalEngine:
    """One engine that somebody else runs."""

    engine_id: str
    url: str
    transport: Transport


@dataclass(frozen=True, slots=True)
class ProcessLayout:
    """All processes of a job. Router and engine host run on CPU, on the node of rank 0."""

    device: Device
    dtype: DType
    """Numbers of trainer and engines alike."""
    trainers: tuple[TrainerPlacement, ...]
    tensor_parallel: int
    """Trainer ranks that share one copy of the model."""
    engines: tuple[EnginePlacement, ...]
    unused_gpus: tuple[int, ...]
    gpu_names: tuple[str, ...] = ()
    """Per visible GPU, its name for CUDA_VISIBLE_DEVICES."""
    external: tuple[ExternalEngine, ...] = ()
    beside: Mapping[str, tuple[EnginePlacement, ...]] = field(default_factory=dict)
    """Engines of models that are not trained, by the model's name, and under `eval` those that only evaluate."""

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


def plan_layout(config: Config, machine: Machine) -> ProcessLayout:
    """The layout of a job; raises InvalidConfigError with every reason why there is none."""
    layout, problems = derive_layout(config, machine)
    if layout is None:
        raise InvalidConfigError(problems)
    return layout


def derive_layout(config: Config, machine: Machine) -> tuple[ProcessLayout | None, list[Problem]]:
    """The layout, or all the reasons why there is none."""
    problems = _rank_problems(config, machine)
    device: Device = "cuda" if machine.gpus else "cpu"
    if config.engine.device not in ("auto", device):
        problems.append(Problem("engine.device", _DEVICE_MISMATCH[device]))
    trainer_alone = config.debug.train_only
    beside = {} if trainer_alone else gpus_beside(config, machine, _trainer_gpus(machine), problems)
    held = frozenset(gpu for group in beside.values() for gpus in group for gpu in gpus)
    engines: tuple[EnginePlacement, ...] = ()
    if not trainer_alone and (config.engine.num_engines or not config.engine.external):
        if device == "cuda":
            engines = _engines_on_gpus(config, machine, held, problems)
        else:
            engines = _engines_on_cpu(config, problems)
    if problems:
        return None, problems
    if config.debug.rollout_only:  # there is no trainer to share a GPU with
        engines = tuple(replace(engine, colocated=False, transport="disk") for engine in engines)
    used = {gpu for engine in engines for gpu in engine.gpus} | set(_trainer_gpus(machine)) | held
    layout = ProcessLayout(
        device=device,
        dtype=config.model.dtype if config.model.dtype != "auto" else "bfloat16" if device == "cuda" else "float32",
        trainers=tuple(
            TrainerPlacement(
                rank=rank,
                node=rank // machine.local_world_size,
                local_rank=rank % machine.local_world_size,
                gpu=rank % machine.local_world_size if device == "cuda" else None,
            )
            for rank in range(machine.world_size)
        ),
        tensor_parallel=config.train.tensor_parallel,
        engines=engines,
        unused_gpus=tuple(i for i in range(len(machine.gpus)) if i not in used),
        gpu_names=machine.gpus,
        external=tuple(
            ExternalEngine(f"external-{i}", url.rstrip("/"), _transport_apart(config))
            for i, url in enumerate(() if trainer_alone else config.engine.external)
        ),
        beside={name: _place_beside(name, group, machine, config) for name, group in beside.items()},
    )
    return layout, []


def place_another(config: Config, layout: ProcessLayout, engine_id: str, taken: Collection[int]) -> EnginePlacement:
    """Where one more engine of the trained model goes while the job runs: on CPU, or on GPUs that nobody uses.

    `taken` are the GPUs of engines so far. Raises EngineError where none are left.
    """
    size = config.engine.tensor_parallel
    if layout.device == "cpu":
        return _on_cpu(config, engine_id)
    free = [gpu for gpu in layout.unused_gpus if gpu not in taken]
    if layout.colocated or len(free) < size:
        left = f"GPUs {free} are left" if free else "no GPU is left"
        reason = "the others share GPUs with the trainer and get weights in place" if layout.colocated else left
        raise EngineError(f"{engine_id} needs {size} GPU(s) of its own: {reason} (those that were stopped keep theirs)")
    gpus = tuple(free[:size])
    return EnginePlacement(
        engine_id=engine_id,
        tensor_parallel=size,
        gpus=gpus,
        visible_devices=",".join(layout.gpu_names[gpu] for gpu in gpus),
        colocated=False,
        transport=_transport_apart(config),
    )


_DEVICE_MISMATCH: dict[Device, str] = {
    "cpu": "cuda, but this job sees no GPU (see nvidia-smi and CUDA_VISIBLE_DEVICES); leave it at auto to run on CPU",
    "cuda": "cpu, but the trainer ranks see GPUs and would use them, and trainer and engines must run on the same kind "
    'of device; leave it at auto, or run everything on CPU with CUDA_VISIBLE_DEVICES=""',
}


def _rank_problems(config: Config, machine: Machine) -> list[Problem]:
    problems = []
    size = config.train.tensor_parallel
    if machine.world_size % size:
        problems.append(
            Problem(
                "train.tensor_parallel",
                f"{size} does not divide the {machine.world_size} trainer ranks; start torchrun with --nproc-per-node "
                f"{size * max(1, machine.world_size // size)} or set a divisor",
            )
        )
    if machine.gpus and machine.local_world_size > len(machine.gpus):
        problems.append(
            Problem(
                "torchrun --nproc-per-node",
                f"{machine.local_world_size} trainer ranks need as many GPUs, but {len(machine.gpus)} are visible; "
                f"start at most {len(machine.gpus)}",
            )
        )
    return problems


def _trainer_gpus(machine: Machine) -> range:
    """Visible GPUs of this node's trainer ranks: local rank i uses GPU i."""
    return range(machine.local_world_size if machine.gpus else 0)


def _engines_on_cpu(config: Config, problems: list[Problem]) -> tuple[EnginePlacement, ...]:
    if config.engine.gpus is not None:
        problems.append(
            Problem("engine.gpus", f"{list(config.engine.gpus)}, but this job sees no GPU; leave it out to run on CPU")
        )
    return tuple(_on_cpu(config, f"engine-{i}") for i in range(config.engine.num_engines or 1))


def _on_cpu(config: Config, engine_id: str) -> EnginePlacement:
    return EnginePlacement(
        engine_id=engine_id,
        tensor_parallel=config.engine.tensor_parallel,
        gpus=(),
        visible_devices="",
        colocated=False,
        transport=_transport_apart(config),
    )


def _place_beside(
    name: str, group: tuple[tuple[int, ...], ...], machine: Machine, config: Config
) -> tuple[EnginePlacement, ...]:
    size = served_beside(config)[name][1].tensor_parallel
    return tuple(
        EnginePlacement(
            engine_id=f"{name}-{i}",
            tensor_parallel=size,
            gpus=gpus,
            visible_devices=",".join(machine.gpus[gpu] for gpu in gpus),
            colocated=False,
            transport="disk",
        )
        for i, gpus in enumerate(group)
    )


def _engines_on_gpus(
    config: Config, machine: Machine, held: Collection[int], problems: list[Problem]
) -> tuple[EnginePlacement, ...]:
    size = config.engine.tensor_parallel
    trainers = set(_trainer_gpus(machine))
    if machine.local_world_size > len(machine.gpus):
        return ()
    before = len(problems)
    pool = _engine_pool(config, machine, held, problems)
    if len(problems) > before:
        return ()
    count = config.engine.num_engines or max(1, len(pool) // size)
    if count * size > len(pool):
        problems.append(
            Problem(
                "engine.num_engines" if config.engine.num_engines else "engine.tensor_parallel",
                f"{count} engine(s) of {size} GPU(s) need {count * size}, but {len(pool)} of the {len(machine.gpus)} "
                f"visible GPUs are free for engines (trainer ranks use {len(trainers)}); use fewer engines, a smaller "
                "engine.tensor_parallel, or fewer trainer ranks",
            )
        )
        return ()
    if config.engine.gpus is not None and count * size != len(pool):
        problems.append(
            Problem(
                "engine.gpus",
                f"{list(pool)} names {len(pool)} GPUs, but {count} engine(s) of {size} GPU(s) use {count * size}; "
                "list exactly those",
            )
        )
        return ()
    engines = []
    for i in range(count):
        gpus = pool[i * size : (i + 1) * size]
        shared = trainers.intersection(gpus)
        if shared and len(shared) != size:
            problems.append(
                Problem(
                    "engine.gpus",
                    f"engine-{i} would take GPUs {list(gpus)}, of which trainer ranks use only {sorted(shared)}; an "
                    "engine shares all of its GPUs with the trainer or none: regroup the list",
                )
            )
            continue
        engines.append(
            EnginePlacement(
                engine_id=f"engine-{i}",
                tensor_parallel=size,
                gpus=gpus,
                visible_devices=",".join(machine.gpus[gpu] for gpu in gpus),
                colocated=bool(shared),
                transport=_gpu_transport(config, bool(shared)),
            )
        )
    problems.extend(_transport_problems(engines))
    problems.extend(_update_problems(config, engines))
    return tuple(engines)


def _engine_pool(config: Config, machine: Machine, held: Collection[int], problems: list[Problem]) -> tuple[int, ...]:
    """GPUs that engines may use, in the order in which engines take them; `held` are for others."""
    visible = range(len(machine.gpus))
    trainers = set(_trainer_gpus(machine))
    colocate = config.engine.colocate or len(machine.gpus) == 1
    if config.engine.gpus is None:
        free = tuple(gpu for gpu in visible if gpu not in trainers and gpu not in held)
        if colocate:
            return tuple(sorted(trainers))
        if not free:
            problems.append(
                Problem(
                    "engine.gpus",
                    f"trainer ranks{' and other models' if held else ''} use all {len(machine.gpus)} visible GPUs and "
                    "none is left for engines; start fewer ranks (torchrun --nproc-per-node), or share GPUs with "
                    "engine.colocate = true",
                )
            )
        return free
    pool = config.engine.gpus
    absent = sorted({gpu for gpu in pool if gpu not in visible})
    if absent:
        problems.append(
            Problem(
                "engine.gpus",
                f"{absent} named, but the visible GPUs are 0 to {len(machine.gpus) - 1} "
                "(indices count among those of CUDA_VISIBLE_DEVICES)",
            )
        )
    if len(set(pool)) != len(pool):
        problems.append(Problem("engine.gpus", f"{list(pool)} names a GPU twice; name each once"))
    conflict = sorted(trainers.intersection(pool))
    if conflict and not colocate:
        problems.append(
            Problem(
                "engine.gpus",
                f"{conflict} are also used by trainer ranks (local rank i uses GPU i); name other GPUs, or share them "
                "with engine.colocate = true",
            )
        )
    return pool


def _gpu_transport(config: Config, colocated: bool) -> Transport:
    if config.weights.transport == "auto" and colocated:
        return "tensor"
    return _transport_apart(config)


def _transport_apart(config: Config) -> Transport:
    """For an engine that shares no GPU with the trainer."""
    return "broadcast" if config.weights.transport == "auto" else config.weights.transport


def _transport_problems(engines: list[EnginePlacement]) -> list[Problem]:
    problems = []
    apart = [e.engine_id for e in engines if e.transport == "tensor" and not e.colocated]
    if apart:
        problems.append(
            Problem(
                "weights.transport",
                f"tensor hands over GPU memory in place, but {', '.join(apart)} shares no GPU with a trainer rank; "
                "leave it at auto, or set engine.colocate = true",
            )
        )
    shared = [e.engine_id for e in engines if e.transport == "broadcast" and e.colocated]
    if shared:
        problems.append(
            Problem(
                "weights.transport",
                f"broadcast cannot reach {', '.join(shared)}: NCCL refuses two ranks on one GPU; leave it at auto or "
                "use tensor",
            )
        )
    return problems


def _update_problems(config: Config, engines: list[EnginePlacement]) -> list[Problem]:
    shared = [e.engine_id for e in engines if e.colocated]
    if config.weights.on_update != "in_place" or not shared:
        return []
    return [
        Problem(
            "weights.on_update",
            f"in_place keeps the KV of running requests, but {', '.join(shared)} gives up all KV whenever the trainer "
            "needs its GPU; use retract, or give engines GPUs of their own",
        )
    ]
