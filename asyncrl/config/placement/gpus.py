"""Which GPUs engines get: those of the trained model, and those of models beside it. Pure.

A choice that cannot work is added to a list of problems, so that a user hears of all of them at once.

Invariants
- Engines beside those of the trained model share no GPU with a trainer rank, with an engine of the trained model, or
  with each other. If the configuration names no GPUs for them, they get the last free ones, and the engines of the
  trained model get the others.
- GPUs that a configuration names are those of the node of rank 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from asyncrl.config.checks.served import served_beside
from asyncrl.config.layout import DRIVER_NODE, Gpu
from asyncrl.config.machine import Machine
from asyncrl.config.problems import Problems
from asyncrl.config.root import Config
from asyncrl.config.sections.inference import ServingConfig
from asyncrl.errors import counted

Share = tuple[Gpu, ...]
"""The GPUs of one engine, all on one node; empty on CPU."""

Pool = Mapping[int, Sequence[int]]
"""GPUs by node, as indices in the order in which engines take them."""


def by_node(gpus: Iterable[Gpu]) -> dict[int, list[int]]:
    """The same GPUs as a pool."""
    pool: dict[int, list[int]] = {}
    for gpu in gpus:
        pool.setdefault(gpu.node, []).append(gpu.index)
    return pool


def shares(pool: Pool, size: int, *, from_end: bool = False) -> list[Share]:
    """As many engines of `size` GPUs as the pool holds, node by node.

    What a node has over is left at its end, or with `from_end` at its beginning.
    """
    found: list[Share] = []
    for node, indices in pool.items():
        first = len(indices) % size if from_end else 0
        starts = range(first, len(indices) - size + 1, size)
        found += [tuple(Gpu(node, index) for index in indices[at : at + size]) for at in starts]
    return found


def gpus_for_trained(
    config: Config,
    machine: Machine,
    training: Collection[Gpu],
    held: Collection[Gpu],
    problems: Problems,
) -> list[Share]:
    """The GPUs of each engine of the trained model. `training` are those of trainer ranks, `held` are for others."""
    engine = config.engine
    if not machine.gpus:
        if engine.gpus is not None:
            text = f"{list(engine.gpus)}, but this job sees no GPU; leave it out to run on CPU"
            problems.add("engine.gpus", text)
        return [()] * (engine.num_engines or 1)
    if machine.local_world_size > len(machine.gpus):
        return []
    before = len(problems)
    pool = _pool(config, machine, training, held, problems)
    if len(problems) > before:
        return []
    size, room = engine.tensor_parallel, sum(map(len, pool.values()))
    found = shares(pool, size)
    count = engine.num_engines or max(1, len(found))
    if count > len(found):
        apart = ", each engine's on one node" if machine.nodes > 1 else ""
        problems.add(
            "engine.num_engines" if engine.num_engines else "engine.tensor_parallel",
            f"{counted(count, 'engine')} of {counted(size, 'GPU')} would take {count * size}{apart}, but {room} of the "
            f"{len(machine.all_gpus)} visible GPUs are free for engines (trainer ranks use {len(training)}); use "
            "fewer engines, a smaller engine.tensor_parallel, or fewer trainer ranks",
        )
        return []
    if engine.gpus is not None and count * size != room:
        problems.add(
            "engine.gpus",
            f"{list(engine.gpus)} names {counted(room, 'GPU')}, but {counted(count, 'engine')} of "
            f"{counted(size, 'GPU')} would take {count * size}; list exactly those",
        )
        return []
    for i, share in enumerate(found[:count]):
        shared = sorted(gpu.index for gpu in share if gpu in training)
        if shared and len(shared) != size:
            problems.add(
                "engine.gpus",
                f"engine-{i} would take GPUs {[gpu.index for gpu in share]}, of which trainer ranks use only "
                f"{shared}; an engine shares all of its GPUs with the trainer or none: regroup the list",
            )
    return found[:count] if len(problems) == before else []


def _pool(
    config: Config, machine: Machine, training: Collection[Gpu], held: Collection[Gpu], problems: Problems
) -> Pool:
    """The GPUs that engines of the trained model may use."""
    colocate = config.engine.colocate or len(machine.gpus) == 1
    if config.engine.gpus is not None:
        named = config.engine.gpus
        if absent := _absent(named, machine):
            problems.add("engine.gpus", f"{absent} (indices count among those of CUDA_VISIBLE_DEVICES)")
        if len(set(named)) != len(named):
            problems.add("engine.gpus", f"{list(named)} names a GPU twice; name each once")
        conflict = sorted(index for index in set(named) if Gpu(DRIVER_NODE, index) in training)
        if conflict and not colocate:
            problems.add(
                "engine.gpus",
                f"{conflict} are also used by trainer ranks (local rank i uses GPU i); name other GPUs, or share "
                "them with engine.colocate = true",
            )
        return {DRIVER_NODE: named}
    if colocate:
        return by_node(sorted(training))
    free = [gpu for gpu in machine.all_gpus if gpu not in training and gpu not in held]
    if not free:
        problems.add(
            "engine.gpus",
            f"trainer ranks{' and other models' if held else ''} use all {len(machine.all_gpus)} visible GPUs and "
            "none is left for engines; start fewer ranks (torchrun --nproc-per-node), or share GPUs with "
            "engine.colocate = true",
        )
    return by_node(free)


def gpus_beside(
    config: Config, machine: Machine, training: Collection[Gpu], problems: Problems
) -> dict[str, tuple[Share, ...]]:
    """The GPUs of each engine beside those of the trained model, by the name of its model."""
    groups = served_beside(config)
    taken = dict.fromkeys(training, "trainer ranks")
    taken |= {Gpu(DRIVER_NODE, index): "engine.gpus" for index in config.engine.gpus or ()}
    chosen: dict[str, tuple[Share, ...]] = {name: ((),) * group[1].num_engines for name, group in groups.items()}
    for name, (section, settings) in sorted(groups.items(), key=lambda group: group[1][1].gpus is None):  # named first
        if settings.gpus is not None:
            key, problem = f"{section}.gpus", _named_problem(settings.gpus, settings, machine, taken)
            found = shares({DRIVER_NODE: settings.gpus}, settings.tensor_parallel)
        elif machine.gpus:
            free = [gpu for gpu in machine.all_gpus if gpu not in taken]
            found = shares(by_node(free), settings.tensor_parallel, from_end=True)[-settings.num_engines :]
            key, problem = f"{section}.num_engines", _room_problem(settings, machine, len(found), len(free))
        else:
            continue
        if problem is not None:
            problems.add(key, problem)
            continue
        chosen[name] = tuple(found)
        taken |= {gpu: f"{section}.gpus" for share in found for gpu in share}
    return chosen


def _named_problem(
    named: tuple[int, ...], settings: ServingConfig, machine: Machine, taken: Mapping[Gpu, str]
) -> str | None:
    """What is wrong with the GPUs that a section names, in words."""
    if not machine.gpus:
        return f"{list(named)}, but this job sees no GPU; leave it out to run on CPU"
    if absent := _absent(named, machine):
        return absent
    shared = {index: taken[Gpu(DRIVER_NODE, index)] for index in named if Gpu(DRIVER_NODE, index) in taken}
    if shared:
        return "; ".join(f"GPU {index} is used by {user}" for index, user in shared.items()) + "; name others"
    need = settings.num_engines * settings.tensor_parallel
    if len(set(named)) != need or len(named) != need:
        return (
            f"{list(named)}, but {counted(settings.num_engines, 'engine')} of "
            f"{counted(settings.tensor_parallel, 'GPU')} would take {need} different ones; list exactly those"
        )
    return None


def _room_problem(settings: ServingConfig, machine: Machine, found: int, free: int) -> str | None:
    """What is wrong where the GPUs that are left hold `found` of the engines of a section, in words."""
    if found == settings.num_engines:
        return None
    need = settings.num_engines * settings.tensor_parallel
    return (
        f"{counted(settings.num_engines, 'engine')} of {counted(settings.tensor_parallel, 'GPU')} would take {need}, "
        f"but of the {len(machine.all_gpus)} visible GPUs {free} are left; use fewer, or leave it out"
    )


def _absent(named: Iterable[int], machine: Machine) -> str | None:
    absent = sorted({index for index in named if index not in range(len(machine.gpus))})
    return f"{absent} named, but the visible GPUs are 0 to {len(machine.gpus) - 1}" if absent else None
