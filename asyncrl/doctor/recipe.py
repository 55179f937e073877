"""A recipe on this machine: whether a job would start with it, and what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from safetensors import SafetensorError, safe_open

from asyncrl.config.machine import Machine
from asyncrl.config.reading.loaded import LoadedConfig
from asyncrl.config.reading.loading import parse_command_line, resolve
from asyncrl.config.root import Config
from asyncrl.data.model_files import safetensors_files, weights_bytes
from asyncrl.doctor.finding import Finding, failed, ok, warning
from asyncrl.errors import AsyncRLError, ModelError, counted
from asyncrl.observability.text_plots import size

_PROCESS_BYTES = 3_000_000_000
"""Host memory of one engine or trainer rank without its numbers: Python, torch, CUDA (2.4 GB measured on CPU)."""
_COPIES = 3
_BYTES_OF_STATE = 12
"""Per parameter, in float32: master weights and the two moments of Adam."""
_NO_RECIPE_DISK, _NO_RECIPE_MEMORY = 10_000_000_000, 2 * _PROCESS_BYTES


@dataclass(frozen=True, slots=True)
class Needs:
    """What a job takes of a node, roughly."""

    disk_bytes: int = _NO_RECIPE_DISK
    memory_bytes: int = _NO_RECIPE_MEMORY


def check(
    argv: Sequence[str], machine: Machine, would_start: Callable[[LoadedConfig], None]
) -> tuple[list[Finding], LoadedConfig | None]:
    """What a dry run of `argv` (`@ recipe.toml --section.key value`) refuses; the configuration where it takes it.

    `would_start` raises AsyncRLError for what only the start would find.
    """
    try:
        loaded = resolve(parse_command_line(argv), machine, dry_run=True)
        would_start(loaded)
    except AsyncRLError as error:
        return [
            failed("recipe", str(error), "mend the recipe, or say with --nproc-per-node how many ranks torchrun starts")
        ], None
    layout = loaded.layout
    own, others = len(layout.engines), len(layout.external)
    parts = f"{counted(len(layout.trainers), 'trainer rank')}, {counted(own + others, 'engine')}"
    seen = f"{parts} on {layout.device} in {layout.dtype}"
    told = [warning("recipe", text, "see the recipe") for text in loaded.warnings]
    return [ok("recipe", seen), *told, *model(loaded.config)], loaded


def model(config: Config) -> Iterator[Finding]:
    """Whether the weights of the model are all there and can be read."""
    path = config.model.path
    if not (path / "config.json").exists():
        yield ok("model", f"{path} is made at the start, by {config.model.builder}")
        return
    try:
        files = safetensors_files(path)
    except ModelError as error:
        yield failed("model", str(error), "download the model whole, as safetensors")
        return
    for file in files:
        try:
            with safe_open(file, framework="numpy"):  # holds the header against the length of the file
                pass
        except (OSError, SafetensorError) as error:
            yield failed("model", f"{file}: {error}", "download the model again, whole")
            return
    yield ok("model", f"{path}: {size(weights_bytes(path))} in {counted(len(files), 'file')}")


def needs(loaded: LoadedConfig | None, weights: int) -> Needs:
    """Disk and host memory of a job whose model has `weights` bytes on disk, in 16 bits a parameter.

    Disk: the export, copies for engines that join, and checkpoints. Memory: every process, what the estimate of the
    job's memory puts on the host, and on a CPU the numbers of trainer and engines too. None: no recipe was given.
    """
    if loaded is None or not weights:
        return Needs()
    config, layout = loaded.config, loaded.layout
    state = weights // 2 * _BYTES_OF_STATE
    copies = 0 if config.weights.keep_published == "never" else _COPIES
    disk = weights * (1 + copies)
    if config.checkpoint.every:
        disk += (config.checkpoint.keep_last + 1) * (weights + state)
    ranks, engines = len(layout.trainers) // layout.nodes, len(layout.engines)
    memory = (ranks + engines) * _PROCESS_BYTES
    memory += sum(loaded.memory.host.values()) if loaded.memory is not None else 0
    if layout.device == "cpu":
        memory += 2 * weights * engines + ranks * (2 * state // 3 + state) // layout.data_parallel
    return Needs(disk, memory)


def as_ranks(machine: Machine, ranks: int) -> Machine:
    """The machine as torchrun with so many ranks would show it."""
    return replace(machine, world_size=ranks, local_world_size=ranks)
