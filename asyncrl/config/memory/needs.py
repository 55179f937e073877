"""What one process needs on its device: named parts that add up, at each moment that may be the worst. Pure data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

PartName = Literal["weights", "gradients", "optimizer", "activations", "logits", "KV", "graphs", "buffers", "runtime"]

Parts = Mapping[PartName, int]
"""Bytes by name."""


@dataclass(frozen=True, slots=True)
class Need:
    """What lies on one device at one moment, in bytes."""

    who: str
    """The process, or what the processes that share the device do then: `rank 0`, `trainer's turn`."""
    parts: Parts
    capacity: int | None = None
    """Of the device; None where it is not known."""

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the device holds it; True where its size is not known."""
        return self.capacity is None or self.total <= self.capacity


@dataclass(frozen=True, slots=True)
class JobMemory:
    """The memory of a whole job."""

    devices: tuple[Need, ...]
    """Each kind of device user at each moment; alike ones once."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Page-locked and other memory that the job takes on the node of rank 0, in bytes by purpose."""
    host_bytes: int | None = None
    """Memory of that node; None where it is not known."""
    usable_share: float | None = None
    """Share of its GPU that a trainer rank can count on; None where the GPU's size is not known."""
    tokens: int | None = None
    """Packing budget that the activations are for; None where no rank trains."""
    longest: int | None = None
    """The longest sequence that one rank can train; None where the device's memory is not known."""
    admitted: int | None = None
    """The longest sequence that the job would sample, by the context of its model."""
    kv_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens whose KV each engine holds."""

    @property
    def host_fits(self) -> bool:
        """Whether the node of rank 0 has the host memory; True where its size is not known."""
        return self.host_bytes is None or sum(self.host.values()) <= self.host_bytes

    @property
    def worst(self) -> Need | None:
        """The need that is farthest over its device; None where all fit."""
        over = [need for need in self.devices if not need.fits]
        return max(over, key=lambda need: need.total - (need.capacity or 0), default=None)


def added(*groups: Parts) -> dict[PartName, int]:
    """Parts of several processes on one device, by name; parts of 0 bytes are left out."""
    total: dict[PartName, int] = {}
    for name, size in (item for group in groups for item in group.items()):
        total[name] = total.get(name, 0) + size
    return {name: size for name, size in total.items() if size}


def largest(phases: Iterable[Parts]) -> Parts:
    """The phase that needs most."""
    return max(phases, key=lambda parts: sum(parts.values()))
