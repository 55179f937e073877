"""The place of a trainer rank: what torchrun tells it, and the shape of the parallel layout. Pure data, no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.errors import ConfigError, counted


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
                f"train.tensor_parallel = {self.tensor_parallel} does not divide {counted(self.world_size, 'rank')}; "
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


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """What torchrun tells a rank. A process without torchrun is a world of one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0
    agent_store: bool = False
    """Whether torchrun's agent serves the store at the master's address; else rank 0 does."""
    restarts: int = 0
    """How often torchrun's agent has restarted its ranks."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> RankEnvironment:
        """Reads the variables that torchrun sets."""
        if "RANK" not in environ:
            return cls()
        return cls(
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ["LOCAL_RANK"]),
            local_world_size=int(environ["LOCAL_WORLD_SIZE"]),
            master_address=environ["MASTER_ADDR"],
            master_port=int(environ["MASTER_PORT"]),
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )

    @property
    def single_node(self) -> bool:
        """Whether all ranks are on this node."""
        return self.local_world_size == self.world_size

    @property
    def link_host(self) -> str:
        """The address at which rank 0 listens for the other ranks: loopback unless there is a second node."""
        return "127.0.0.1" if self.single_node else self.master_address

    @property
    def meeting_place(self) -> str:
        """The address of the store, as `host:port`."""
        return f"{self.master_address}:{self.master_port}"

    def layout(self, config: Config) -> RankLayout:
        """The rank's place in the parallel layout. Raises ConfigError where the ranks do not fill whole copies."""
        return RankLayout(self.rank, self.world_size, self.local_rank, config.train.tensor_parallel)
