"""One role's shards of a checkpoint, as a rank of any layout reads them.

Invariants
- Files are mapped into memory, so a rank reads the slices that it asks for and no more.
- What is missing or damaged is named with its file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.training.checkpoints.manifest import SavedLayout
from asyncrl.training.checkpoints.shard import Shard, ShardFacts, piece_name, shard_paths
from asyncrl.training.checkpoints.slices import Cut, Parts, Piece, slices
from asyncrl.training.ranks.layout import RankLayout


class SavedShards:
    """The shards of `role` in the checkpoint `directory`, which ranks in the layout `saved` wrote.

    Raises CheckpointError, as all of its methods do, where a file cannot be read.
    """

    def __init__(self, directory: Path, saved: SavedLayout, layout: RankLayout, role: str) -> None:
        self._directory = directory
        self._saved = saved
        self._layout = layout
        self._role = role
        self._files: dict[int, Any] = {}
        shards = [self._facts_of(rank) for rank in range(saved.ranks)]
        self.facts = [shard.facts for shard in shards]
        """Of each rank that saved."""
        self._pieces = [shard.pieces for shard in shards]

    @property
    def same_layout(self) -> bool:
        """Whether each rank finds the shard that it wrote itself."""
        return self._saved == SavedLayout(self._layout.world_size, self._layout.tensor_parallel)

    def own(self) -> Shard:
        """What this rank saved, in the same layout."""
        assert self.same_layout
        rank = self._layout.rank
        return Shard(self._open(rank).get_tensors(), self.facts[rank], self._pieces[rank])

    def read(self, name: str, kind: str, cut: Cut | None, piece: Piece, dtype: torch.dtype) -> Tensor:
        """One state of a parameter (its weights, a moment of its updates) for a piece of this rank's part: [elements].

        It lies in the mapped file where it was saved in one slice.
        """
        size = next((pieces[name].size for pieces in self._pieces if name in pieces), None)
        if size is None:
            raise CheckpointError(f"{self._directory} does not fit: {name} is in none of the shards of {self._role}")
        sources: dict[int, list[tuple[Piece, Tensor]]] = {}
        parts: list[Tensor] = []
        for part in slices(
            cut,
            saved=Parts(self._saved.tensor_parallel, size),
            wanted=Parts(self._layout.tensor_parallel, piece.size),
            rank=self._layout.tensor_parallel_rank,
            start=piece.start,
            stop=piece.stop,
        ):
            if part.rank is None:
                parts.append(torch.zeros(part.size, dtype=dtype))
                continue
            if part.rank not in sources:
                sources[part.rank] = self._sources(name, kind, part.rank, dtype)
            pieces = list(_cover(sources[part.rank], part.start, part.start + part.size))
            if sum(map(len, pieces)) < part.size:
                raise CheckpointError(
                    f"{self._directory} does not fit: the shards of {self._role} do not hold all of {name} of "
                    f"tensor-parallel rank {part.rank}"
                )
            parts += pieces
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _sources(self, name: str, kind: str, tensor_rank: int, dtype: torch.dtype) -> list[tuple[Piece, Tensor]]:
        """The pieces of the part that `tensor_rank` saved, in order: one of each copy of the model that holds one."""
        ranks = range(tensor_rank, self._saved.ranks, self._saved.tensor_parallel)
        held = [(self._pieces[rank][name], rank) for rank in ranks if name in self._pieces[rank]]
        held.sort(key=lambda entry: entry[0].start)
        return [(piece, self._tensor(rank, piece_name(name, kind), piece, dtype)) for piece, rank in held]

    def _tensor(self, rank: int, name: str, piece: Piece, dtype: torch.dtype) -> Tensor:
        try:
            tensor: Tensor = self._open(rank).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self._tensors_path(rank)} does not fit: {error}") from error
        if tensor.dtype != dtype or tensor.shape != (piece.stop - piece.start,):
            raise CheckpointError(
                f"{self._tensors_path(rank)} does not fit: {name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} "
                f"[{piece.stop - piece.start}]"
            )
        return tensor

    def _open(self, rank: int) -> Any:
        if rank not in self._files:
            path = self._tensors_path(rank)
            try:
                self._files[rank] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise self._unreadable(path, error) from error
        return self._files[rank]

    def _facts_of(self, rank: int) -> ShardFacts:
        path = shard_paths(self._directory, rank, self._saved.ranks, self._role)[1]
        try:
            return msgspec.json.decode(path.read_bytes(), type=ShardFacts)
        except (OSError, msgspec.DecodeError) as error:
            raise self._unreadable(path, error) from error

    def _tensors_path(self, rank: int) -> Path:
        return shard_paths(self._directory, rank, self._saved.ranks, self._role)[0]

    def _unreadable(self, path: Path, error: Exception) -> CheckpointError:
        return CheckpointError(f"{path} cannot be read on rank {self._layout.rank}: {error}")


def _cover(sources: Sequence[tuple[Piece, Tensor]], start: int, stop: int) -> Iterator[Tensor]:
    """Elements [start, stop) of a part, as far as its pieces have them."""
    for piece, tensor in sources:
        if start < stop and piece.start <= start < piece.stop:
            end = min(stop, piece.stop)
            yield tensor[start - piece.start : end - piece.start]
            start = end
