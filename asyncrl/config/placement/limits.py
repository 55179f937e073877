"""Ranks, devices and engines that cannot work where they are, in words. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from asyncrl.config.checks.served import EVAL
from asyncrl.config.layout import DRIVER_NODE, Device, EnginePlacement, ExternalEngine, ServedPlacement
from asyncrl.config.machine import Machine
from asyncrl.config.problems import Problem
from asyncrl.config.root import Config

_DEVICE_MISMATCH: Mapping[Device, str] = {
    "cpu": "cuda, but this job sees no GPU (see nvidia-smi and CUDA_VISIBLE_DEVICES); leave it at auto to run on CPU",
    "cuda": "cpu, but the trainer ranks see GPUs and would use them, and trainer and engines must run on the same kind "
    'of device; leave it at auto, or run everything on CPU with CUDA_VISIBLE_DEVICES=""',
}


def machine_problems(config: Config, machine: Machine) -> Iterator[Problem]:
    """Ranks that do not fit the machine or the model's copies, and devices that it does not have."""
    size = config.train.tensor_parallel
    if machine.world_size % size:
        yield Problem(
            "train.tensor_parallel",
            f"{size} does not divide the {machine.world_size} trainer ranks; start torchrun with --nproc-per-node "
            f"{size * max(1, machine.world_size // size)} or set a divisor",
        )
    if machine.gpus and machine.local_world_size > len(machine.gpus):
        yield Problem(
            "torchrun --nproc-per-node",
            f"{machine.local_world_size} trainer ranks need as many GPUs, but {len(machine.gpus)} are visible; "
            f"start at most {len(machine.gpus)}",
        )
    if config.engine.device not in ("auto", machine.device):
        yield Problem("engine.device", _DEVICE_MISMATCH[machine.device])
    if config.train.optimizer_on_host and machine.device == "cuda" and config.model.dtype == "float32":
        yield Problem(
            "train.optimizer_on_host",
            "needs weights in bfloat16 on the GPU: in float32 the GPU holds the very weights that are updated; leave "
            "model.dtype at auto, or set train.optimizer_on_host = false",
        )


def trained_problems(
    config: Config, engines: Sequence[EnginePlacement], external: Sequence[ExternalEngine]
) -> Iterator[Problem]:
    """Ways of updating weights that cannot reach the trained model's engines where they are."""
    ways_to = {engine.engine_id: engine.transport for engine in engines}
    ways_to |= {engine.engine_id: engine.transport for engine in external}
    by_way: dict[str, list[str]] = {}
    for engine_id, way in ways_to.items():
        by_way.setdefault(way, []).append(engine_id)
    if len(by_way) > 1:
        ways = " and ".join(f"{way} reaches {', '.join(ids)}" for way, ids in sorted(by_way.items()))
        yield Problem(
            "weights.transport",
            "a publication uses one transport, but some engines share the trainer's GPUs and some do not: only "
            f"{ways}; name in engine.gpus only GPUs of trainer ranks or only others, or set weights.transport = disk",
        )
    apart = [e.engine_id for e in engines if e.transport == "tensor" and not e.colocated]
    if apart:
        yield Problem(
            "weights.transport",
            f"tensor hands over GPU memory in place, but {', '.join(apart)} shares no GPU with a trainer rank; "
            "leave it at auto, or set engine.colocate = true",
        )
    colocated = [e.engine_id for e in engines if e.colocated]
    by_broadcast = [e.engine_id for e in engines if e.colocated and e.transport == "broadcast"]
    if by_broadcast:
        yield Problem(
            "weights.transport",
            f"broadcast cannot reach {', '.join(by_broadcast)}: NCCL refuses two ranks on one GPU; leave it at "
            "auto or use tensor",
        )
    if colocated and config.weights.on_update == "in_place":
        yield Problem(
            "weights.on_update",
            f"in_place keeps the KV of running requests, but {', '.join(colocated)} gives up all KV whenever the "
            "trainer needs its GPU; use retract, or give engines GPUs of their own",
        )


def unhosted_problems(
    engines: Sequence[EnginePlacement], beside: Mapping[str, ServedPlacement], hosted: Collection[int]
) -> Iterator[Problem]:
    """Engines on nodes where the job cannot start processes: one problem that names them all."""
    away = [engine for engine in engines if engine.node not in hosted]
    near = len(engines) - len(away)
    fixes = [f"set engine.num_engines = {near}"] if 0 < near < len(engines) else []
    for name, served in beside.items():
        own = [engine for engine in served.engines if engine.node not in hosted]
        if own:
            section = "eval.fleet" if name == EVAL else f"models.{name}"
            fixes.append(f"name GPUs of node {DRIVER_NODE} in {section}.gpus")
        away += own
    if away:
        fixes.append("start engines there yourself and name them in engine.external")
        yield Problem(
            "torchrun --nnodes",
            f"{', '.join(engine.engine_id for engine in away)} would run on node "
            f"{', '.join(map(str, sorted({engine.node for engine in away})))}, and a job can start processes only on "
            f"node {DRIVER_NODE}, that of rank 0; {', or '.join(fixes)}",
        )
