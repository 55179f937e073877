"""What one rank of an engine needs on its device. Pure.

SGLang takes a share of the memory that is free when it starts (`mem_fraction_static`) for weights and KV, and leaves
the rest to CUDA graphs and activations. Where nobody says the share, it follows from the size of the GPU by rules of
SGLang's own, which stand here as a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncrl.config.architecture import Architecture
from asyncrl.config.layout import Device, DType
from asyncrl.config.memory import trainer
from asyncrl.config.memory.needs import Parts, added
from asyncrl.config.memory.shapes import BYTES, RankShape

N = TypeVar("N", int, float)

COLOCATED_MEMORY_FRACTION = 0.6
"""Share of the GPU's memory that a colocated engine takes for weights and KV; the trainer's step needs the rest."""
RUNTIME_BYTES = 1 << 30
"""Assumed, of an engine's rank on a GPU: CUDA context, kernels and communicators."""
OFFLOADED_BYTES = 5 << 29
"""Assumed, of such a rank that has given its memory back: also FlashInfer's workspace (512 MiB), buffers of the sampler
and of NCCL, and what torch's allocator keeps of them."""
_LEAST_ACTIVATIONS = 512 << 20
"""Of an engine whose memory others share: the constant part of what SGLang sets aside."""
CPU_MAX_TOTAL_TOKENS = 65536
"""KV pool of an engine on CPU, in tokens, where nobody says it."""
_MIB, _GIB = 1 << 20, 1 << 30
_CLASSES = (
    (20, 2048, 8, 8),
    (35, 4096, 48, 160),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
    (1 << 20, 16384, 512, 512),
)
"""GPUs of less than so many GiB: tokens of a prefill chunk, and the largest batch of CUDA graphs below and from 4 ranks
on (SGLang, `arg_groups/memory_hook.py`)."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """One rank of an engine, in bytes."""

    parts: Parts
    kv_tokens: int
    """Sequences of so many tokens together fit the KV pool; below 1 the weights leave no room."""

    @property
    def static(self) -> Parts:
        """What stays while it serves, without the KV pool: that takes what is left."""
        return {name: size for name, size in self.parts.items() if name != "KV"}

    @property
    def offloaded(self) -> Parts:
        """What stays once it has given weights, KV and graphs back."""
        return {"runtime": OFFLOADED_BYTES} if "runtime" in self.parts else {}


def engine_memory(
    model: Architecture,
    *,
    dtype: DType,
    device: Device,
    ranks: int,
    capacity: int | None,
    settings: Mapping[str, Any],
    colocated: bool,
) -> EngineMemory:
    """`ranks`: tensor-parallel ranks. `settings`: `max_total_tokens` and server arguments, as the engine gets them.

    `capacity` None: the size of the device is not known, and the KV pool is as large as was asked for, or 0.
    """
    shape = RankShape(model, ranks)
    weights, each = shape.parameters * BYTES[dtype], shape.kv_bytes(dtype)
    asked = _number(settings.get("max_total_tokens"), int)
    if device == "cpu" or capacity is None:
        tokens = asked or (CPU_MAX_TOTAL_TOKENS if device == "cpu" else 0)
        return EngineMemory(added({"weights": weights, "KV": tokens * each}), tokens)
    graphs, activations = _reserved(capacity, ranks)
    told = _number(settings.get("mem_fraction_static"), float) or (COLOCATED_MEMORY_FRACTION if colocated else None)
    fraction = max(0.0, 1 - (graphs + activations) / capacity) if told is None else min(told, 1.0)
    free = max(0, capacity - RUNTIME_BYTES)
    pool = int(free * fraction) - weights
    left = free - int(free * fraction) - graphs - (trainer.RUNTIME_BYTES if colocated else 0)
    activations = max(_LEAST_ACTIVATIONS, min(activations, left))
    tokens = pool // each if asked is None else min(asked, pool // each)
    rest: Parts = {"weights": weights, "graphs": graphs, "activations": activations, "runtime": RUNTIME_BYTES}
    return EngineMemory(added({"KV": max(tokens, 0) * each}, rest), tokens)


def _reserved(capacity: int, ranks: int) -> tuple[int, int]:
    """What SGLang sets aside for (CUDA graphs, activations)."""
    _, chunk, few, many = next(row for row in _CLASSES if capacity < row[0] * _GIB)
    graphs = 2 * (few if ranks < 4 else many) * _MIB
    activations = int((512 + 1.5 * chunk + 1024 * ranks / 8) * _MIB)
    if capacity > 60 * _GIB:
        activations = max(activations, 10 * _GIB - graphs)
    return graphs, activations


def _number(value: object, kind: type[N]) -> N | None:
    """A positive number; None for anything else, which the check of server arguments refuses."""
    return value if isinstance(value, kind) and not isinstance(value, bool) and value > 0 else None
