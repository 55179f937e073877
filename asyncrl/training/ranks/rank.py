"""A trainer rank: its process groups, and the command loop of ranks >= 1."""

from __future__ import annotations

import os
from datetime import timedelta

import structlog
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from asyncrl.config import Config
from asyncrl.config.machine import Machine
from asyncrl.errors import TrainerError
from asyncrl.observability.logging import forwarded
from asyncrl.training.backends import make_backend
from asyncrl.training.learner.backend import BackendFactory
from asyncrl.training.ranks.command_channel import CommandChannel
from asyncrl.training.ranks.commands import RankState, Shutdown
from asyncrl.training.ranks.device import check_device
from asyncrl.training.ranks.layout import RankEnvironment
from asyncrl.training.ranks.meeting import meet
from asyncrl.training.ranks.rank_link import Done, Failed, LinkAddress, LinkClient, describe

_LINK_KEY = "asyncrl/rank-link"
REPORT_GRACE_S = 30.0
"""A failed rank stays so long, so that rank 0 can report the failure before torchrun ends all ranks."""

_log = structlog.get_logger(__name__)


def join_process_groups(environment: RankEnvironment, store: Store, timeout_s: float) -> CommandChannel:
    """Builds the default process group (NCCL and gloo with GPUs, gloo without) and the control group. Collective.

    It binds the CUDA device, so it must run in the thread that will train. `timeout_s` is that of a collective.
    Raises TrainerError where torch cannot use the GPUs that the layout has.
    """
    check_device(Machine.detect())
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
        timeout=timedelta(seconds=timeout_s),
    )
    return CommandChannel(environment.world_size)


def join_as_rank_zero(environment: RankEnvironment, config: Config, address: LinkAddress | None) -> CommandChannel:
    """Tells the other ranks the address of the rank link (None: there are no others), then joins the groups."""
    store = meet(environment, config.train.init_timeout_s)
    if address is not None:
        store.set(_LINK_KEY, address.encode())
    return join_process_groups(environment, store, config.train.collective_timeout_s)


def serve_rank(
    config: Config, make_backend: BackendFactory = make_backend, environment: RankEnvironment | None = None
) -> None:
    """The whole life of a rank >= 1: joins the groups, executes rank 0's commands, returns when told to stop.

    The caller decides which signals end the process (asyncrl.exit_protocol).

    Raises:
        TrainerError: a command failed here; rank 0 knows, and all ranks should end.
    """
    environment = environment or RankEnvironment.from_environ()
    try:
        store = meet(environment, config.train.init_timeout_s)
        link = _link_of(environment, store, config.train.init_timeout_s)
    except TrainerError as error:
        _log.error(str(error))  # there is no rank 0 yet that could tell it
        raise
    with forwarded(link.say, rank=environment.rank):
        _serve(config, make_backend, environment, store, link)


def _link_of(environment: RankEnvironment, store: Store, timeout_s: float) -> LinkClient:
    """The link to rank 0. Raises TrainerError where rank 0 cannot be reached."""
    where = f"at {environment.meeting_place}"
    try:
        address = LinkAddress.decode(store.get(_LINK_KEY).decode())
        where = f"at {address.host}:{address.port}"
        return LinkClient(address, environment.rank, timeout_s)
    except (OSError, dist.DistError) as error:
        raise TrainerError(
            f"trainer rank {environment.rank} cannot reach rank 0 {where}: {error}; rank 0's own output says whether "
            "it ended; if it did not, let the nodes reach each other on every port"
        ) from error


def _serve(
    config: Config, make_backend: BackendFactory, environment: RankEnvironment, store: Store, link: LinkClient
) -> None:
    seq = 0
    try:
        channel = join_process_groups(environment, store, config.train.collective_timeout_s)
        state = RankState(config, environment.layout(config), make_backend, link.send, link.desk)
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
