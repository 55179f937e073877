"""Machines that are not here: `--as 8x80GB`, `--as 8xH100`, `--as 2x8xH200` become a `Machine` to plan for. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from asyncrl.config.machine import Machine
from asyncrl.config.problems import InvalidConfigError, Problem
from asyncrl.config.root import Config

_MIB = 1 << 20
KNOWN_GPUS: Mapping[str, int] = {
    "A100": 81920 * _MIB,
    "A100-40GB": 40960 * _MIB,
    "A10": 23028 * _MIB,
    "B200": 182630 * _MIB,
    "H100": 81559 * _MIB,
    "H200": 143771 * _MIB,
    "L4": 23034 * _MIB,
    "L40S": 46068 * _MIB,
}
"""Memory of GPUs by name, in bytes, as the driver tells it."""
MOST_GPUS = 1024
"""Of one node, and most nodes."""
_UNITS = {"GB": 10**9, "GIB": 1 << 30}
_FORM = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z][\w-]*|\d+(?:\.\d+)?(?:GB|GiB))", re.IGNORECASE)


def planned_machine(written: str, ranks: int | None, here: Machine, config: Config) -> Machine:
    """The machine that `--as` means. `ranks`: trainer ranks on each node, `--nproc-per-node`.

    Without `ranks` they are those that torchrun started. Without torchrun they are as many as leave the GPUs to the
    engines that were asked for: all of them where engines share GPUs, else those that the engines do not take, else
    half. What is not known of that machine, its cores and limits, refuses nothing.

    Raises InvalidConfigError for a machine that cannot be read.
    """
    form = _FORM.fullmatch(written.strip())
    size = _gpu_bytes(form[3]) if form else None
    counts = [int(count) for count in form.groups()[:2] if count is not None] if form else []
    if size is None or not all(1 <= count <= MOST_GPUS for count in counts):
        known = ", ".join(KNOWN_GPUS)
        text = f"{written!a} is no machine; write 8x80GB, 8xH100, or 2x8x80GB for two nodes (known: {known})"
        raise InvalidConfigError([Problem("--as", text)])
    nodes, gpus = (1, *counts)[-2:] if counts else (1, 1)
    if ranks is None:
        ranks = here.local_world_size if here.world_size > 1 else _ranks_left(config, gpus)
    return replace(
        here,
        world_size=nodes * ranks,
        local_world_size=ranks,
        gpus=tuple(map(str, range(gpus))),
        gpu_bytes=size,
        cpus=tuple(range(MOST_GPUS)),
        open_files=None,
        host_bytes=None,
    )


def _gpu_bytes(written: str) -> int | None:
    """`80GB`, `80GiB` or the name of a known GPU."""
    for unit, size in _UNITS.items():
        number = written.upper().removesuffix(unit)
        if number != written.upper() and number[0].isdigit():
            return int(float(number) * size) or None
    return {name.upper(): size for name, size in KNOWN_GPUS.items()}.get(written.upper())


def _ranks_left(config: Config, gpus: int) -> int:
    """Trainer ranks of a node where nobody says how many, a multiple of `train.tensor_parallel`."""
    engine, size = config.engine, config.train.tensor_parallel
    if engine.colocate or gpus == 1 or config.debug.train_only:
        left = gpus
    elif engine.gpus is not None or engine.num_engines is not None:
        taken = len(engine.gpus) if engine.gpus is not None else (engine.num_engines or 1) * engine.tensor_parallel
        left = gpus - taken
    else:
        left = gpus // 2
    return max(left - left % size, 1)
