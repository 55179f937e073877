"""Figures of an optimizer step: sums and maxima over tokens, added up over micro-batches and ranks in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.errors import AlgorithmError


@dataclass(slots=True)
class Tally:
    """Sums and maxima over tokens by name; those of one rank until `reduce` is called."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor]) -> Tally:
        """Takes scalar tensors off the device, all sums in one transfer and all maxima in another."""
        return cls(_floats(sums), _floats(maxima))

    def add(self, other: Tally) -> None:
        """Adds the sums of `other`, and keeps the larger of each maximum.

        Raises AlgorithmError where both have figures, and not of the same names.
        """
        if self.sums and (self.sums.keys() != other.sums.keys() or self.maxima.keys() != other.maxima.keys()):
            raise AlgorithmError(
                f"train.algorithm: the loss returns the figures {', '.join(other.sums | other.maxima)} for one "
                f"micro-batch and {', '.join(self.sums | self.maxima)} for another; return the same names always"
            )
        for key, value in other.sums.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        for key, value in other.maxima.items():
            self.maxima[key] = max(self.maxima.get(key, value), value)

    def reduce(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Collective: adds up over the ranks of `group`, all of which hold the same names in the same order."""
        for values, op in ((self.sums, dist.ReduceOp.SUM), (self.maxima, dist.ReduceOp.MAX)):
            if values:
                packed = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
                dist.all_reduce(packed, op=op, group=group)
                values.update(zip(values, packed.tolist(), strict=True))


def _floats(values: Mapping[str, Tensor]) -> dict[str, float]:
    return dict(zip(values, torch.stack([v.double() for v in values.values()]).tolist(), strict=True)) if values else {}
