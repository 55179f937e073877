"""The rules of placement: which process runs on which node and GPU. Pure functions of configuration and machine.

Invariants
- No GPU has two users, except an engine that shares its GPUs with trainer ranks: it then shares all of them.
- No engine reaches across nodes.
- Engines share GPUs with the trainer only where the user asked for it (`engine.colocate`) or where each node has a
  single GPU. Elsewhere they get GPUs that no trainer rank uses, node by node.
- New weights reach all engines in one way. So all of them share the trainer's GPUs or none does, unless they load from
  disk.
- The whole job runs on one kind of device: on GPUs when it sees any, else on CPU.
- A layout that cannot work is refused here, before anything starts. That includes an engine on a node where the job
  cannot start processes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from asyncrl.config.checks.external import normal_url
from asyncrl.config.checks.served import served_beside
from asyncrl.config.layout import (
    DRIVER_NODE,
    DType,
    EnginePlacement,
    ExternalEngine,
    Gpu,
    HostPlacement,
    ProcessLayout,
    RewardPlacement,
    RouterPlacement,
    ServedPlacement,
    TrainerPlacement,
    Transport,
)
from asyncrl.config.machine import Machine
from asyncrl.config.placement.gpus import Share, by_node, gpus_beside, gpus_for_trained, shares
from asyncrl.config.placement.limits import machine_problems, trained_problems, unhosted_problems
from asyncrl.config.placement.threads import threads_on_cpu
from asyncrl.config.problems import InvalidConfigError, Problems
from asyncrl.config.root import Config
from asyncrl.errors import EngineError, counted

HOSTED = (DRIVER_NODE,)
"""Nodes on which a job can start processes. Rank 0 starts the host of its own node; other nodes have none yet."""


def plan_layout(config: Config, machine: Machine) -> ProcessLayout:
    """The layout of a job; raises InvalidConfigError with every reason why there is none."""
    layout, problems = derive_layout(config, machine)
    if layout is None:
        raise InvalidConfigError(problems)
    return layout


def derive_layout(
    config: Config, machine: Machine, hosted: Collection[int] = HOSTED
) -> tuple[ProcessLayout | None, Problems]:
    """The layout, or all the reasons why there is none. `hosted`: nodes on which processes can be started."""
    problems = Problems(machine_problems(config, machine))
    trainers = _trainers(machine)
    ranks = {Gpu(t.node, t.gpu): t.rank for t in trainers if t.gpu is not None}
    training = frozenset(ranks)
    trainer_alone = config.debug.train_only
    beside = {} if trainer_alone else gpus_beside(config, machine, training, problems)
    held = frozenset(gpu for group in beside.values() for share in group for gpu in share)
    engines: tuple[EnginePlacement, ...] = ()
    if not trainer_alone and (config.engine.num_engines or not config.engine.external):
        engines = tuple(
            _trained_engine(
                config, machine.gpus, f"engine-{i}", share, tuple(ranks[gpu] for gpu in share if gpu in ranks)
            )
            for i, share in enumerate(gpus_for_trained(config, machine, training, held, problems))
        )
    external = _external(config)
    if config.debug.rollout_only:  # there is no trainer to share a GPU with
        engines = tuple(replace(engine, trainer_ranks=(), transport="disk") for engine in engines)
    else:
        problems += trained_problems(config, engines, external)
    served = {name: _beside(name, group, machine, config) for name, group in beside.items()}
    problems += unhosted_problems(engines, served, hosted)
    if problems:
        return None, problems
    used = training | held | {gpu for engine in engines for gpu in engine.devices}
    own_dtype: DType = "bfloat16" if machine.device == "cuda" else "float32"
    layout = ProcessLayout(
        device=machine.device,
        dtype=own_dtype if config.model.dtype == "auto" else config.model.dtype,
        trainers=trainers,
        tensor_parallel=config.train.tensor_parallel,
        engines=engines,
        unused_gpus=tuple(gpu for gpu in machine.all_gpus if gpu not in used),
        gpu_names=machine.gpus,
        external=external,
        beside=served,
        rewards=RewardPlacement(0 if trainer_alone else config.reward.workers, DRIVER_NODE),
        hosts=tuple(HostPlacement(node) for node in range(machine.nodes) if node in hosted),
        threads=threads_on_cpu(machine, sum(e.tensor_parallel for e in engines)) if machine.device == "cpu" else None,
    )
    return layout, problems


def place_another(config: Config, layout: ProcessLayout, engine_id: str, taken: Collection[Gpu]) -> EnginePlacement:
    """The place of one more engine of the trained model while the job runs: on CPU, or on GPUs that nobody uses.

    `taken` are the GPUs of the engines so far. Raises EngineError where none are left.
    """
    if layout.device == "cpu":
        return _trained_engine(config, (), engine_id, ())
    size = config.engine.tensor_parallel
    hosted = {host.node for host in layout.hosts}
    free = by_node(gpu for gpu in layout.unused_gpus if gpu not in taken)
    found = shares({node: indices for node, indices in free.items() if node in hosted}, size)
    if layout.colocated or not found:
        reason = "; ".join(_left(node, indices, layout) for node, indices in free.items()) or "no GPU is left"
        if layout.colocated:
            reason = "the others share GPUs with the trainer and get weights in place"
        raise EngineError(
            f"{engine_id} needs {counted(size, 'GPU')} of its own: {reason} (engines that were stopped keep theirs)"
        )
    return _trained_engine(config, layout.gpu_names, engine_id, found[0])


def _left(node: int, indices: Sequence[int], layout: ProcessLayout) -> str:
    """`GPUs [2, 3] are left`, and on which of several nodes."""
    if layout.nodes == 1:
        return f"GPUs {[*indices]} are left"
    out_of_reach = "" if HostPlacement(node) in layout.hosts else ", where a job cannot start processes"
    return f"GPUs {[*indices]} are left on node {node}{out_of_reach}"


def _trainers(machine: Machine) -> tuple[TrainerPlacement, ...]:
    """All ranks, in order. Local rank i uses GPU i of its node."""
    places = [divmod(rank, machine.local_world_size) for rank in range(machine.world_size)]
    return tuple(
        TrainerPlacement(rank, node, local_rank, local_rank if machine.gpus else None)
        for rank, (node, local_rank) in enumerate(places)
    )


def _external(config: Config) -> tuple[ExternalEngine, ...]:
    urls = () if config.debug.train_only else config.engine.external
    transport = _transport(config, colocated=False)
    return tuple(ExternalEngine(f"external-{i}", normal_url(url), transport) for i, url in enumerate(urls))


def _trained_engine(
    config: Config, names: Sequence[str], engine_id: str, share: Share, trainer_ranks: tuple[int, ...] = ()
) -> EnginePlacement:
    """`trainer_ranks`: those on the GPUs of `share`, in its order."""
    transport = _transport(config, colocated=bool(trainer_ranks))
    placed = _engine(engine_id, share, names, config.engine.tensor_parallel, transport)
    return replace(placed, trainer_ranks=trainer_ranks)


def _beside(name: str, group: tuple[Share, ...], machine: Machine, config: Config) -> ServedPlacement:
    size = served_beside(config)[name][1].tensor_parallel
    engines = tuple(_engine(f"{name}-{i}", share, machine.gpus, size, "disk") for i, share in enumerate(group))
    return ServedPlacement(RouterPlacement(f"router-{name}", DRIVER_NODE), engines)


def _engine(engine_id: str, share: Share, names: Sequence[str], size: int, transport: Transport) -> EnginePlacement:
    return EnginePlacement(
        engine_id=engine_id,
        node=share[0].node if share else DRIVER_NODE,
        tensor_parallel=size,
        gpus=tuple(gpu.index for gpu in share),
        visible_devices=",".join(names[gpu.index] for gpu in share),
        transport=transport,
    )


def _transport(config: Config, *, colocated: bool) -> Transport:
    if config.weights.transport == "auto":
        return "tensor" if colocated else "broadcast"
    return config.weights.transport
