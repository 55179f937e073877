"""The place of a trainer rank among the others, and the shape of the parallel layout. Pure data, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankLayout:
    """One rank. Tensor-parallel ranks are neighbours: ranks [0, TP) share the first copy of the model."""

    rank: int
    """Global rank; rank 0 is the driver."""
    world_size: int
    local_rank: int
    """Rank on this node; the index of its GPU among the visible ones."""
    tensor_parallel: int
    """Ranks that share one copy of the model."""

    def __post_init__(self) -> None:
        if self.world_size % self.tensor_parallel:
            raise ConfigError(
                f"train.tensor_parallel = {self.tensor_parallel} does not divide the {self.world_size} ranks; "
                f"start torchrun with a multiple of it (--nproc-per-node)"
            )

    @property
    def data_parallel(self) -> int:
        """Copies of the model."""
        return self.world_size // self.tensor_parallel

    @property
    def data_parallel_rank(self) -> int:
        """The index of the copy that this rank belongs to."""
        return self.rank // self.tensor_parallel

    @property
    def tensor_parallel_rank(self) -> int:
        """The index of the part of its copy that this rank holds."""
        return self.rank % self.tensor_parallel
