"""The memory of a job as lines of text, about 100 columns wide at most. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from asyncrl.config.memory.needs import JobMemory, Need, PartName

_UNITS = ((10**9, "GB"), (10**6, "MB"))
_WIDTH = 7
_NAMES: dict[PartName, str] = {
    "weights": "weight",
    "gradients": "grads",
    "optimizer": "Adam",
    "activations": "activ.",
    "buffers": "buffer",
    "runtime": "other",
}


def memory_lines(memory: JobMemory) -> list[str]:
    """A table: one line for each moment of each kind of process, one column for each part that any of them has."""
    unit, symbol = next(u for u in _UNITS if u is _UNITS[-1] or any(need.total >= u[0] for need in memory.devices))
    columns = [name for name in get_args(PartName) if any(name in need.parts for need in memory.devices)]
    first = max(len("per GPU"), *(len(need.who) for need in memory.devices)) + 2
    known = any(need.capacity is not None for need in memory.devices)
    place = "GPU" if known else "rank"
    heads = [*(_NAMES.get(name, name) for name in columns), "sum", *(["of"] if known else [])]
    share = f"; trainer ranks can use {memory.usable_share:.0%} of theirs" if memory.usable_share else ""
    lines = [f"memory in {symbol} for each {place}, estimated as docs/gpu.md says{share}"]
    lines.append("  " + " " * first + "".join(f"{head:>{_WIDTH}}" for head in heads))
    for need in memory.devices:
        sizes = [need.parts.get(name, 0) for name in columns] + [need.total]
        cells = "".join(f"{_number(size, unit):>{_WIDTH}}" for size in sizes)
        lines.append(f"  {need.who:<{first}}{cells}{_capacity(need, unit) if known else ''}")
    return [*lines, *(f"  {line}" for line in _notes(memory, unit, symbol))]


def _capacity(need: Need, unit: int) -> str:
    if need.capacity is None:
        return ""
    return f"{_number(need.capacity, unit):>{_WIDTH}}" + ("" if need.fits else "  does not fit")


def _notes(memory: JobMemory, unit: int, symbol: str) -> Iterator[str]:
    if memory.tokens is not None:
        line = f"micro-batches of {memory.tokens} tokens"
        if memory.longest is not None:
            line += f"; one rank can train sequences of up to {memory.longest} tokens"
        yield line
    if memory.longest and memory.admitted and memory.longest < memory.admitted:
        yield f"the model takes up to {memory.admitted}: model.context_length = {memory.longest} keeps longer ones out"
    if memory.kv_tokens:
        yield f"KV of {min(memory.kv_tokens.values())} tokens in each engine"
    for purpose, size in memory.host.items():
        yield f"host memory: {_number(size, unit)} {symbol}, {purpose}"
    if memory.host and memory.host_bytes is not None:
        yield f"host memory of the node of rank 0: {_number(memory.host_bytes, unit)} {symbol}"


def _number(size: int, unit: int) -> str:
    return f"{size / unit:.1f}" if size else "-"
