"""A trainer rank: its place in torchrun's environment, its process groups, and the command loop of ranks >= 1."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import structlog
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as meet

from asyncrl.config import Config
from asyncrl.errors import TrainerError
from asyncrl.observability.logging import forwarded
from asyncrl.training.backends import make_backend
from asyncrl.training.learner.backend import BackendFactory
from asyncrl.training.ranks.command_channel import CommandChannel
from asyncrl.training.ranks.commands import RankState, Shutdown
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.training.ranks.rank_link import Done, Failed, LinkAddress, LinkClient, describe

_LINK_KEY = "asyncrl/rank-link"
REPORT_GRACE_S = 30.0
"""A failed rank stays so long, so that rank 0 can report the failure before torchrun ends all ranks."""

COLLECTIVE_MARGIN_S = 60.0
"""Collectives time out so much later than a command, so that the driver names the rank that hangs before the
collectives of the others fail."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """What torchrun tells a rank. A process without torchrun is a world of one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_address: str = "127.0.0.1"
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

    def layout(self, config: Config) -> RankLayout:
        """The rank's place in the parallel layout. Raises ConfigError where the ranks do not fill whole copies."""
        return RankLayout(self.rank, self.world_size, self.local_rank, config.train.tensor_parallel)


def rendezvous(environment: RankEnvironment, timeout_s: float) -> Store:
    """The store in which the ranks of this attempt meet.

    The agent's own store outlives its ranks. A prefix for each attempt keeps the ranks of the next attempt from reading
    what these leave there.
    """
    if environment.world_size == 1:
        return HashStore()
    timeout = timedelta(seconds=timeout_s)
    iterator = meet("env://", environment.rank, environment.world_size, timeout=timeout)
    store: Store = next(iterator)[0]
    store.set_timeout(timeout)
    return PrefixStore(f"asyncrl/attempt-{environment.restarts}", store)


def join_process_groups(environment: RankEnvironment, store: Store, timeout_s: float) -> CommandChannel:
    """Builds the default process group (NCCL and gloo with GPUs, gloo without) and the control group. Collective.

    It binds the CUDA device, so it must run in the thread that will train. `timeout_s` is the deadline of a command.
    """
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(environment.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    if environment.single_node:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        store=PrefixStore("asyncrl/default", store),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(seconds=timeout_s + COLLECTIVE_MARGIN_S),
    )
    return CommandChannel(environment.world_size)


def join_as_rank_zero(environment: RankEnvironment, config: Config, address: LinkAddress | None) -> CommandChannel:
    """Tells the other ranks the address of the rank link (None: there are no others), then joins the groups."""
    store = rendezvous(environment, config.train.init_timeout_s)
    if address is not None:
        store.set(_LINK_KEY, address.encode())
    return join_process_groups(environment, store, config.train.step_timeout_s)


def serve_rank(
    config: Config, make_backend: BackendFactory = make_backend, environment: RankEnvironment | None = None
) -> None:
    """The whole life of a rank >= 1: joins the groups, executes rank 0's commands, returns when told to stop.

    The caller decides which signals end the process (asyncrl.exit_protocol).

    Raises:
        TrainerError: a command failed here; rank 0 knows, and all ranks should end.
    """
    environment = environment or RankEnvironment.from_environ()
    store = rendezvous(environment, config.train.init_timeout_s)
    address = LinkAddress.decode(store.get(_LINK_KEY).decode())
    link = LinkClient(address, environment.rank, config.train.init_timeout_s)
    with forwarded(link.say, rank=environment.rank):
        _serve(config, make_backend, environment, store, link)


def _serve(
    config: Config, make_backend: BackendFactory, environment: RankEnvironment, store: Store, link: LinkClient
) -> None:
    seq = 0
    try:
        channel = join_process_groups(environment, store, config.train.step_timeout_s)
        state = RankState(config, environment.layout(config), make_backend, link.send)
        while True:
            message = channel.receive()
            seq = message.seq
            state.execute(message.command, message.batch)
            link.send(Done(seq))
            if isinstance(message.command, Shutdown):
                link.close()
                dist.destroy_process_group()
                return
    except Exception as error:  # of any kind: rank 0 must know of it
        failure = describe(environment.rank, error)
        link.send(Failed(seq, failure.error, failure.message, failure.frames))
        link.ended.wait(REPORT_GRACE_S)
        link.close()
        raise TrainerError(str(failure)) from error
