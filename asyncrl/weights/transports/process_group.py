"""Rank 0's end of the process groups {trainer, TP ranks of one engine}; everything here runs in the trainer thread.

The engines build their end with torch's own helper, so the keys of the rendezvous store must nest as that helper nests
them: PrefixStore(device) over PrefixStore(name) over PrefixStore(name). gloo and NCCL go through the same code.

Invariants
- The trainer thread makes no call to a process group: each group has a thread for that (`wire.py`). So every wait ends
  at its deadline, whatever call blocks, and a group that breaks or is late costs the others that wait alone.
- A gloo group forms while it is made. An NCCL group forms in its first broadcast, so it counts as formed once one
  element has gone through it.
- A group with a `failure` was left.
- An engine that is blocked in a receive over gloo is freed when its group and its store are dropped. Over NCCL nothing
  but its own end frees it: its kernel waits on its GPU.
- torch watches no NCCL group of a transfer: its watchdog ends the process for an error that costs us one engine.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from threading import Event
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    Store,
    TCPStore,
)

from asyncrl.observability.waits import WAITS
from asyncrl.weights.buckets import TensorSpec
from asyncrl.weights.transports.gpu_stream import SendStream
from asyncrl.weights.transports.wire import Wire

Backend = Literal["gloo", "nccl"]

DEVICES: dict[Backend, str] = {"gloo": "cpu", "nccl": "cuda"}
"""Where broadcast tensors must be."""

PROOF = TensorSpec("asyncrl.transfer_group", "float32", (1,))
"""What proves an NCCL group. An engine ignores a tensor of this name, so its weights stay whole."""

POLL_S = 0.0005

LEAVE_S = 0.5
"""How long the trainer thread waits until a group is gone. A gloo group takes milliseconds."""

NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
"""torch makes no watchdog for an NCCL group that is made while this is 1."""


class TransferGroup:
    """Rank 0 of `world_size`. The constructor opens the store; `form` builds the group, once the engine has come."""

    def __init__(self, backend: Backend, name: str, world_size: int, host: str, timeout_s: float) -> None:
        self.backend = backend
        self.device = DEVICES[backend]
        """Where broadcast tensors must be."""
        self.name = name
        self.world_size = world_size
        self.declined = False
        """Set in the event loop: the engine refused to come, or failed later, so it is not waited for."""
        self.give_up_at = math.inf
        """Set in the event loop: the group is not wanted any more, and is formed until then (monotonic time)."""
        self.failure: str | None = None
        """Why the group cannot be used, once it cannot."""
        self.timeout_s = timeout_s
        """For a bucket, for the engine to come, and for the group to form."""
        self._under_way: Future[None] | None = None
        self._what = ""
        self._deadline = math.inf
        self._wire: Wire | None = None
        # A store that opens its own socket listens on every interface, whatever host it is given.
        listener = socket.create_server((host, 0))
        self._store: TCPStore | None = TCPStore(
            host,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.port = self._store.port

    @property
    def alive(self) -> bool:
        """False once dropped."""
        return self._store is not None

    @property
    def engine_has_come(self) -> bool:
        """Whether the engine has found the store."""
        return self._store is not None and self._store.num_keys() > 0

    @property
    def forming(self) -> bool:
        """Whether `form` was called and has not failed."""
        return self._wire is not None

    def form(self) -> None:
        """Begins to build the group with every rank of the engine; `ended` tells when that is over."""
        assert self._store is not None and self._wire is None
        nested: Store = PrefixStore(
            f"{self.device}/", PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store))
        )
        make = partial(_process_group, self.backend, nested, self.world_size, self.timeout_s)
        self._wire = wire = Wire(self.name, make, SendStream() if self.backend == "nccl" else None)
        self._begin("the weight transfer group did not form", wire.form(self._proof, self._options()))

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Begins to send `tensors`, each as one message; `ended` tells when that is over.

        Over NCCL they must be computed already (`wait_until_computed`).
        """
        assert self._wire is not None and self._under_way is None
        self._begin("it did not take a weight bucket", self._wire.broadcast(tensors, self._options()))

    def ended(self) -> bool:
        """Whether nothing is under way: it succeeded, or `failure` says why it did not and the group was left."""
        if self._under_way is None:
            return True
        if self._under_way.done():
            error = self._under_way.exception()
            reason = None if error is None else f"{self._what}: {_first_line(error)}"
        elif self.declined:
            reason = f"{self._what}: its engine refused it or failed"
        elif time.monotonic() > self._deadline:
            reason = f"{self._what} within {self.timeout_s:g} s"
        else:
            return False
        self._under_way = None
        if reason is not None:
            self.fail(reason)
        return True

    def fail(self, reason: str) -> None:
        """Leaves the group for `reason`; waits for nothing."""
        self.failure = reason
        self.drop()

    def drop(self) -> Event | None:
        """Leaves the group; returns what is set once it is gone. Idempotent: None where there is nothing to leave."""
        wire, self._wire, self._store, self._under_way = self._wire, None, None, None
        if wire is None:
            return None
        wire.leave()
        return wire.left

    def _begin(self, what: str, under_way: Future[None]) -> None:
        self._what, self._under_way = what, under_way
        self._deadline = time.monotonic() + self.timeout_s

    def _proof(self) -> list[Tensor]:
        """What a group must have sent to count as formed."""
        return [] if self.backend == "gloo" else [torch.zeros(PROOF.shape, dtype=torch.float32, device=self.device)]

    def _options(self) -> BroadcastOptions:
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        # NCCL then sends on the wire's own stream, which is waited for, and returns no operation.
        options.asyncOp = self.backend == "gloo"
        options.timeout = _operation_timeout(self.backend, self.timeout_s)
        return options


def form_all(groups: Iterable[TransferGroup], timeout_s: float) -> None:
    """Forms each group as soon as its engine has come; leaves those whose engine declined, failed or is late.

    What was left has a `failure`.
    """
    waiting, deadline = list(groups), time.monotonic() + timeout_s
    with WAITS.register("weight transfer groups", "engines", timeout_s), _without_watchdog(waiting):
        while waiting:
            waiting = [group for group in waiting if not _has_formed(group, deadline)]
            time.sleep(POLL_S if waiting else 0.0)


def _has_formed(group: TransferGroup, come_by: float) -> bool:
    """Takes a group on towards its forming; whether that has ended."""
    given_up = time.monotonic() > group.give_up_at
    if group.forming and not given_up:
        return group.ended()
    has_come, wanted = group.engine_has_come, not group.declined and group.give_up_at == math.inf
    if has_come and wanted:
        group.form()
    elif has_come or given_up or group.declined or time.monotonic() > come_by:
        group.fail(f"it did not come to the weight transfer group within {group.timeout_s:g} s")
        return True
    return False


def broadcast(groups: Mapping[str, TransferGroup], tensors: Sequence[Tensor]) -> None:
    """Sends `tensors` to all groups at once (engine id → group), and returns when that has ended in each.

    A group that broke was left, and has a `failure`.
    """
    sending = list(groups.values())
    with WAITS.register("weight bucket", ", ".join(groups), max(group.timeout_s for group in sending)):
        for group in sending:
            group.begin(tensors)
        while sending:
            sending = [group for group in sending if not group.ended()]
            time.sleep(POLL_S if sending else 0.0)


def drop_all(groups: Iterable[TransferGroup]) -> None:
    """Leaves all groups; waits `LEAVE_S` at most until they are gone."""
    leaving, deadline = [group.drop() for group in groups], time.monotonic() + LEAVE_S
    for left in leaving:
        if left is not None:
            left.wait(max(0.0, deadline - time.monotonic()))


def _process_group(backend: Backend, store: Store, world_size: int, timeout_s: float) -> Any:
    timeout = _operation_timeout(backend, timeout_s)
    if backend == "gloo":
        return ProcessGroupGloo(store, 0, world_size, timeout)
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, 0, world_size, options)


def _operation_timeout(backend: Backend, timeout_s: float) -> timedelta:
    """torch's own timeout. gloo cannot be aborted and must end by it; over NCCL it must not come before ours."""
    return timedelta(seconds=timeout_s if backend == "gloo" else 2 * timeout_s + 30.0)


@contextmanager
def _without_watchdog(groups: Sequence[TransferGroup]) -> Iterator[None]:
    """No NCCL group that is made meanwhile is watched by torch. Rank 0 makes no other group meanwhile."""
    if all(group.backend == "gloo" for group in groups):
        yield
        return
    before = os.environ.get(NO_WATCHDOG)
    os.environ[NO_WATCHDOG] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_WATCHDOG]
        else:
            os.environ[NO_WATCHDOG] = before


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
