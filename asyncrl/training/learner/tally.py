"""Figures of an optimizer step: sums and maxima over tokens, added up over micro-batches and ranks in float64.

Invariant: the figures of a micro-batch stay on the device that computed them. Reading one waits until the device has
done all its work, so they are read once for each step, after the last backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.errors import AlgorithmError


@dataclass(slots=True)
class Tally:
    """Sums and maxima over the tokens of a step on all ranks, by name."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Adds the sums of `other`, and keeps the larger of each maximum.

        Raises AlgorithmError where both have figures, and not of the same names.
        """
        if self.sums:
            _check_names((self.sums, self.maxima), (other.sums, other.maxima))
        for key, value in other.sums.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        for key, value in other.maxima.items():
            self.maxima[key] = max(self.maxima.get(key, value), value)


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums and maxima over the tokens of one micro-batch, where they were computed."""

    sum_names: tuple[str, ...]
    maximum_names: tuple[str, ...]
    sums: Tensor
    """float64 [names]."""
    maxima: Tensor
    """float64 [names]."""

    @classmethod
    def of(cls, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor]) -> Figures:
        """Takes scalar tensors, wherever they lie; their graphs are let go."""
        names, maximum_names = sorted(sums), sorted(maxima)  # the order in which a user's algorithm names them is free
        values = [*(sums[name] for name in names), *(maxima[name] for name in maximum_names)]
        scalars = torch.stack([value.detach().to(sums["loss"].device, torch.float64) for value in values])
        return cls(tuple(names), tuple(maximum_names), scalars[: len(names)], scalars[len(names) :])


def tally(figures: Sequence[Figures], group: dist.ProcessGroup) -> Tally:
    """Adds up the figures of this rank's micro-batches, of which there is at least one, and of the ranks of `group`.

    Collective: all ranks have figures of the same names.

    Raises AlgorithmError where two micro-batches have figures of different names.
    """
    first, *others = figures
    sums, maxima = first.sums, first.maxima
    for part in others:
        _check_names((first.sum_names, first.maximum_names), (part.sum_names, part.maximum_names))
        sums, maxima = sums + part.sums, torch.maximum(maxima, part.maxima)
    dist.all_reduce(sums, group=group)
    if len(maxima):
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    values = torch.cat([sums, maxima]).tolist()
    names = len(first.sum_names)
    return Tally(
        dict(zip(first.sum_names, values[:names], strict=True)),
        dict(zip(first.maximum_names, values[names:], strict=True)),
    )


def _check_names(names: Sequence[Collection[str]], others: Sequence[Collection[str]]) -> None:
    if list(map(set, names)) != list(map(set, others)):
        raise AlgorithmError(
            f"train.algorithm: the loss returns the figures {', '.join(chain(*others))} for one micro-batch and "
            f"{', '.join(chain(*names))} for another; return the same names always"
        )
