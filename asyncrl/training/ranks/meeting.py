"""The ranks meet: each tells the store that it has come, and waits for the others.

Invariants
- A rank that waits says for which ranks, at which address and how long: after `FIRST_TOLD_S`, and again each time that
  the wait has lasted twice as long. Ranks 0 and 1 and one rank of each other node say it, so no terminal is silent.
- A meeting ends by its deadline, with an error that names the ranks that are missing and the address. No thread is left
  in a C++ call, which would abort the process when the interpreter ends.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import structlog
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from asyncrl.errors import TrainerError
from asyncrl.training.ranks.layout import RankEnvironment

FIRST_TOLD_S = 15.0
_LOOK_S = 0.1
"""Between two looks at the store, or two tries to reach it."""
_CONNECT_S = 5.0
"""Longest wait for one answer of the node of rank 0."""
_STORE_S = 30.0
"""Longest wait for a store that begins to answer."""
_NAMED = 8
"""Ranks that a message names; of more it tells the number."""

_log = structlog.get_logger(__name__)


def meet(environment: RankEnvironment, timeout_s: float) -> Store:
    """Returns the store in which the ranks of this attempt meet, once all of them have come.

    The agent's own store outlives its ranks. A prefix for each attempt keeps the ranks of the next attempt from reading
    what these leave there.

    Raises TrainerError, which names the ranks that have not come within `timeout_s` and the address.
    """
    if environment.world_size == 1:
        return HashStore()
    wait = _Wait(environment, timeout_s)
    serves = environment.rank == 0 and not environment.agent_store
    shared = _serve(environment) if serves else _reach(wait)
    shared.set_timeout(timedelta(seconds=timeout_s))
    store = PrefixStore(f"asyncrl/attempt-{environment.restarts}", shared)
    come = [f"asyncrl/come/{rank}" for rank in range(environment.world_size)]
    try:
        store.set(come[environment.rank], "")
        while not store.check(come):
            wait.tell(lambda: [rank for rank, key in enumerate(come) if not store.check([key])])
            time.sleep(_LOOK_S)
    except dist.DistError as error:
        raise TrainerError(
            f"trainer rank 0 has left {environment.meeting_place} before all ranks had come; its own output says why"
        ) from error
    return store


def absent(ranks: Sequence[int], place: str) -> str:
    """`trainer ranks 1, 3 have not come to 10.0.0.1:29500`."""
    named = ", ".join(str(rank) for rank in ranks[:_NAMED])
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    verb = "s {} have" if len(ranks) > 1 else " {} has"
    return f"trainer rank{verb.format(named + more)} not come to {place}"


class _Wait:
    """The wait of one rank for the others, with one deadline for all of its parts."""

    def __init__(self, environment: RankEnvironment, timeout_s: float) -> None:
        self.environment = environment
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._told_s = FIRST_TOLD_S
        self._speaks = environment.rank <= 1 or environment.local_rank == 0

    @property
    def left_s(self) -> float:
        """Time until the deadline."""
        return self._began + self._timeout_s - time.monotonic()

    def tell(self, missing: Callable[[], Sequence[int]], why: str = "") -> None:
        """Says which ranks are `missing`, and `why`, where it is time to. Raises TrainerError at the deadline."""
        waited_s, place = self._timeout_s - self.left_s, self.environment.meeting_place
        if waited_s >= self._timeout_s:
            raise TrainerError(
                f"{absent(missing(), place)} within {self._timeout_s:g} s{why}; start every rank, with the same "
                "--nnodes and --master-addr (or --rdzv-endpoint) of torchrun on every node, or raise "
                "train.init_timeout_s"
            )
        if waited_s >= self._told_s:
            self._told_s *= 2
            if self._speaks:
                waiting = f"waiting {waited_s:.0f} s of {self._timeout_s:g} s"
                _log.warning(f"{absent(missing(), place)} ({waiting}{why})")


def _serve(environment: RankEnvironment) -> Store:
    """The store, which rank 0 serves."""
    try:
        return TCPStore(
            environment.master_address,
            environment.master_port,
            environment.world_size,
            is_master=True,
            timeout=timedelta(seconds=_STORE_S),
            wait_for_workers=False,
        )
    except dist.DistError as error:
        raise TrainerError(
            f"trainer rank 0 cannot serve at {environment.meeting_place}, where the ranks meet: "
            f"{str(error).splitlines()[0]}; it must be an address of this node (--master-addr) with a port that is "
            "free (--master-port)"
        ) from error


def _reach(wait: _Wait) -> Store:
    """The store, which the agent or rank 0 serves, once it answers."""
    environment, problem = wait.environment, ""
    while True:
        try:
            address = (environment.master_address, environment.master_port)
            socket.create_connection(address, timeout=max(0.1, min(_CONNECT_S, wait.left_s))).close()
            return TCPStore(
                *address,
                environment.world_size,
                timeout=timedelta(seconds=_STORE_S),
                wait_for_workers=False,
            )
        except OSError as error:  # refused, no such name, no route: all may change while rank 0 starts
            problem = f": {error.strerror or error}"
        except dist.DistError as error:  # it listens, and is no store
            problem = f": {str(error).splitlines()[0]}"
        wait.tell(lambda: [0], problem)
        time.sleep(_LOOK_S)
