"""The dry run: what would run where, and every value with its origin. The report is itself a valid TOML file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config.layout import ProcessLayout
from asyncrl.config.machine import Machine
from asyncrl.config.reading.toml import config_toml
from asyncrl.config.root import Config

if TYPE_CHECKING:
    from asyncrl.config.reading.loading import LoadedConfig


def dry_run_report(loaded: LoadedConfig) -> str:
    """Process layout as comments, then the resolved configuration as TOML."""
    lines = ["dry run: nothing was started", "", *layout_lines(loaded.config, loaded.layout, loaded.machine)]
    comments = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return f"{comments}\n{config_toml(loaded.config, loaded.sources)}"


def layout_lines(config: Config, layout: ProcessLayout, machine: Machine) -> list[str]:
    """One line for each process of the job."""
    kind = f"{len(machine.gpus)} GPU(s)" if layout.device == "cuda" else "CPU"
    shape = f"{layout.data_parallel} data x {layout.tensor_parallel} tensor parallel"
    ranks = f"{len(layout.trainers)} trainer rank(s), {shape}"
    lines = [f"process layout on {kind}, {layout.dtype}: {ranks}; {len(layout.engines)} engine(s)"]
    for trainer in layout.trainers:
        copy, part = divmod(trainer.rank, layout.tensor_parallel)
        place = "CPU" if trainer.gpu is None or config.debug.rollout_only else f"node {trainer.node} GPU {trainer.gpu}"
        role = f"{'driver and trainer' if trainer.rank == 0 else 'trainer'}, model copy {copy} part {part}"
        if config.debug.rollout_only:
            role = "driver" if trainer.rank == 0 else "leaves at once: there is no trainer"
        lines.append(f"  {f'rank {trainer.rank}':<12} {place:<16} {role}")
    lines.append(f"  {'host':<12} {'CPU':<16} owns engines, router and reward workers")
    port = "a free port" if config.router.port is None else f"port {config.router.port}"
    if not config.debug.train_only:
        lines.append(
            f"  {'router':<12} {'CPU':<16} {config.router.package}, {config.router.policy}, {config.run.host}, {port}"
        )
    for engine in layout.engines:
        place = "GPU " + ",".join(map(str, engine.gpus)) if engine.gpus else "CPU"
        shared = ", shares its GPU with the trainer" if engine.colocated else ""
        cores = f", cores {','.join(map(str, config.engine.cpus))}" if config.engine.cpus is not None else ""
        lines.append(
            f"  {engine.engine_id:<12} {place:<16} tensor parallel {engine.tensor_parallel}, weights by "
            f"{engine.transport}{shared}{cores}"
        )
    lines.extend(
        f"  {external.engine_id:<12} {external.url}, not started here, weights by {external.transport}"
        for external in layout.external
    )
    for name, engines in layout.beside.items():
        model = config.models.get(name)
        what = "for evaluation, on demand" if model is None else f"{model.path or config.model.path}, never updated"
        lines.append(f"  {f'router-{name}':<12} {'CPU':<16} {config.router.package}, a free port")
        lines.extend(
            f"  {engine.engine_id:<12} {'GPU ' + ','.join(map(str, engine.gpus)) if engine.gpus else 'CPU':<16} "
            f"tensor parallel {engine.tensor_parallel}, {what}"
            for engine in engines
        )
    if config.reward.workers and not config.debug.train_only:
        lines.append(f"  {'rewards':<12} {'CPU':<16} {config.reward.workers} worker(s)")
    if layout.unused_gpus:
        lines.append(f"  unused: GPU {', '.join(map(str, layout.unused_gpus))}")
    return lines
