"""All checks in order, told one by one: `asyncrl doctor [--nproc-per-node N] [--no-engine] [@ recipe.toml ...]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.text import Text

from asyncrl.config.machine import Machine
from asyncrl.config.reading.loaded import LoadedConfig
from asyncrl.config.sections.run import RunConfig
from asyncrl.config.sections.shown import TrackConfig
from asyncrl.data.model_files import weights_bytes
from asyncrl.doctor import gpus, machine, packages, recipe
from asyncrl.doctor.engines import engines_start, run_command
from asyncrl.doctor.finding import Finding, Level
from asyncrl.driver import check_start
from asyncrl.errors import counted
from asyncrl.host.open_files import raise_open_files

_COLORS: dict[Level, str] = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def findings(argv: Sequence[str], *, ranks: int, engine: bool) -> Iterator[Finding]:
    """Every check of this machine. `argv` names a recipe and its settings, or nothing."""
    told: list[Finding] = []
    loaded: LoadedConfig | None = None
    here = recipe.as_ranks(Machine.detect(), ranks)
    if argv:
        told, loaded = recipe.check(argv, here, check_start)
    yield from packages.look(TrackConfig() if loaded is None else loaded.config.track)
    facts = gpus.look()
    yield gpus.driver(facts)
    yield from gpus.devices(facts)
    yield from gpus.nccl(facts)
    yield from gpus.compilers(facts, gpus.find_tools())
    needs, run_dir = recipe.needs(None, 0), RunConfig().dir
    if loaded is not None:
        weights = weights_bytes(loaded.config.model.path)
        needs, run_dir = recipe.needs(loaded, weights), loaded.config.run.dir
    yield from machine.look(
        Path(run_dir), run_bytes=needs.disk_bytes, memory_bytes=needs.memory_bytes, on_gpus=bool(facts.gpus)
    )
    yield from told
    if engine:
        yield engines_start(run_command)


def show(found: Iterator[Finding], stream: IO[str] | None = None) -> int:
    """Prints each finding as it comes; returns the exit code: 1 where a check failed."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    count: dict[Level, int] = {"ok": 0, "warning": 0, "failed": 0}
    for each in found:
        count[each.level] += 1
        indent = "\n" + " " * 26
        line = Text(f"{each.level:<9}", style=_COLORS[each.level])
        line.append(f"{each.check:<17}", style="bold").append(each.seen.replace("\n", indent), style="default not bold")
        if each.mend:
            line.append(f"{indent}→ {each.mend}", style="default not bold")
        console.print(line)
    console.print(f"\n{count['failed']} failed, {counted(count['warning'], 'warning')}, {count['ok']} ok")
    return 1 if count["failed"] else 0


def check_up(argv: Sequence[str], *, ranks: int, engine: bool) -> int:
    """The whole command; returns its exit code."""
    raise_open_files()
    return show(findings(argv, ranks=ranks, engine=engine))
