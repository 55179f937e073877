"""The report of a dry run: which process would run where with how much memory, and every value with its origin.

It is a valid TOML file.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config.layout import ProcessLayout
from asyncrl.config.machine import Machine
from asyncrl.config.memory.table import memory_lines
from asyncrl.config.placement.gpus import by_node
from asyncrl.config.reading.loaded import LoadedConfig
from asyncrl.config.reading.toml import config_toml
from asyncrl.config.root import Config
from asyncrl.errors import counted


def dry_run_report(loaded: LoadedConfig) -> str:
    """The process layout and its memory as comments, then the resolved configuration as TOML."""
    lines = ["dry run: nothing was started", "", *layout_lines(loaded.config, loaded.layout, loaded.machine)]
    if loaded.memory is not None:
        lines += ["", *memory_lines(loaded.memory)]
    if loaded.planned is not None:
        nodes = f"--nnodes {loaded.machine.nodes} " if loaded.machine.nodes > 1 else ""
        start = f"torchrun {nodes}--nproc-per-node {loaded.machine.local_world_size}"
        lines += ["", f"planned for {loaded.planned}, which is not this machine: there, start with {start}"]
    comments = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return f"{comments}\n{config_toml(loaded.config, loaded.sources)}"


def layout_lines(config: Config, layout: ProcessLayout, machine: Machine) -> list[str]:
    """One line for each process of the job."""
    kind = counted(len(machine.all_gpus), "GPU") if layout.device == "cuda" else "CPU"
    kind += f" of {layout.nodes} nodes" if layout.nodes > 1 else ""
    shape = f"{layout.data_parallel} data x {layout.tensor_parallel} tensor parallel"
    ranks = f"{counted(len(layout.trainers), 'trainer rank')}, {shape}"
    lines = [f"process layout on {kind}, {layout.dtype}: {ranks}; {counted(len(layout.engines), 'engine')}"]

    def add(name: str, node: int, gpus: Sequence[int], what: str, *, with_node: bool = layout.nodes > 1) -> None:
        place = "GPU " + ",".join(map(str, gpus)) if gpus else "CPU"
        lines.append(f"  {name:<12} {f'node {node} {place}' if with_node else place:<16} {what}")

    for trainer in layout.trainers:
        copy, part = divmod(trainer.rank, layout.tensor_parallel)
        role = f"{'driver and trainer' if trainer.rank == 0 else 'trainer'}, model copy {copy} part {part}"
        if config.debug.rollout_only:
            role = "driver" if trainer.rank == 0 else "leaves at once: there is no trainer"
        elif layout.threads is not None:
            role += f", {_threads(layout)}"
        gpus = () if trainer.gpu is None or config.debug.rollout_only else (trainer.gpu,)
        add(f"rank {trainer.rank}", trainer.node, gpus, role, with_node=bool(gpus) or layout.nodes > 1)
    for host in layout.hosts:
        add("host", host.node, (), "owns engines, router and reward workers")
    port = "a free port" if config.router.port is None else f"port {config.router.port}"
    package = config.router.package
    if not config.debug.train_only:
        what = f"{package}, {config.router.policy}, {config.run.host}, {port}"
        add(layout.router.name, layout.router.node, (), what)
    for engine in layout.engines:
        shared = ", shares its GPU with the trainer" if engine.colocated else ""
        cores = f", cores {','.join(map(str, config.engine.cpus))}" if config.engine.cpus is not None else ""
        threads = "" if layout.threads is None else f", at most {_engine_threads(layout, engine.engine_id)} a rank"
        what = f"tensor parallel {engine.tensor_parallel}, weights by {engine.transport}{shared}{cores}{threads}"
        add(engine.engine_id, engine.node, engine.gpus, what)
    lines.extend(
        f"  {external.engine_id:<12} {external.url}, not started here, weights by {external.transport}"
        for external in layout.external
    )
    for name, served in layout.beside.items():
        model = config.models.get(name)
        what = "for evaluation, on demand" if model is None else f"{model.path or config.model.path}, never updated"
        add(served.router.name, served.router.node, (), f"{package}, a free port")
        for engine in served.engines:
            add(engine.engine_id, engine.node, engine.gpus, f"tensor parallel {engine.tensor_parallel}, {what}")
    if layout.rewards.workers:
        add("rewards", layout.rewards.node, (), counted(layout.rewards.workers, "worker"))
    for node, indices in by_node(layout.unused_gpus).items():
        where = f"node {node} " if layout.nodes > 1 else ""
        lines.append(f"  unused: {where}GPU {', '.join(map(str, indices))}")
    return lines


def _threads(layout: ProcessLayout) -> str:
    """`2 threads (1 where both work at once)`."""
    return _in_turn_or_not([layout.trainer_threads(overlaps=overlaps) for overlaps in (False, True)], layout)


def _engine_threads(layout: ProcessLayout, engine_id: str) -> str:
    return _in_turn_or_not([layout.engine_threads(engine_id, overlaps=overlaps) for overlaps in (False, True)], layout)


def _in_turn_or_not(counts: Sequence[int | None], layout: ProcessLayout) -> str:
    in_turn, overlapping = counts
    also = f" ({overlapping} where both work at once)" if layout.engines and overlapping != in_turn else ""
    assert in_turn is not None, "it is told where threads are chosen"
    return counted(in_turn, "thread") + also
