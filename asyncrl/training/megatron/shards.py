"""A rank's share of Megatron's parameters in checkpoints, under names and cuts that every layout and module spec knows.

Saving copies what the rank holds and moves nothing between ranks. Reading takes slices from the shards of those ranks
that saved them (`SavedShards`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.config.architecture import Architecture
from asyncrl.training.checkpoints.saved_shards import SavedShards
from asyncrl.training.checkpoints.shard import Shard, piece_name
from asyncrl.training.checkpoints.slices import Piece
from asyncrl.training.megatron import mapping
from asyncrl.training.ranks.layout import RankLayout

WEIGHT = "weight"
"""The weights of a piece, in the precision of their updates."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds of one parameter: live tensors."""

    name: str
    """Megatron's."""
    piece: Piece
    states: Mapping[str, Tensor]
    """`WEIGHT`, and the moments of its updates; each has the elements of the piece, in any shape."""


Read = Callable[[str, str, Piece, torch.dtype], Tensor]
"""Reads (Megatron's name, state, piece, dtype) from a checkpoint: [elements]. They may lie in a mapped file: copy them.

Raises CheckpointError.
"""


def shard_of(held: Iterable[Held], facts: dict[str, Any]) -> Shard:
    """Copies what a rank holds into host memory."""
    tensors, pieces = {}, {}
    for parameter in held:
        name = mapping.entry(parameter.name).name
        pieces[name] = parameter.piece
        for kind, value in parameter.states.items():
            tensors[piece_name(name, kind)] = value.detach().to("cpu", copy=True).view(-1)
    return Shard(tensors, facts, pieces)


def reader(
    saved: SavedShards, shapes: Mapping[str, tuple[int, ...]], architecture: Architecture, layout: RankLayout
) -> Read:
    """Reads the pieces of this rank; `shapes` are those of its parts by Megatron's names."""

    def read(name: str, kind: str, piece: Piece, dtype: torch.dtype) -> Tensor:
        entry = mapping.entry(name)
        cut = mapping.cut_of(entry.kind, shapes[name], architecture, ranks=layout.tensor_parallel)
        return saved.read(entry.name, kind, cut, piece, dtype)

    return read
