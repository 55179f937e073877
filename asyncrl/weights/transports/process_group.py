"""Rank 0's end of the process groups {trainer, TP ranks of one engine}; everything here runs in the trainer thread.

The engines build their end with torch's own helper, so the keys of the rendezvous store must nest as that helper nests
them: PrefixStore(device) over PrefixStore(name) over PrefixStore(name). gloo and NCCL go through the same code.

Invariants
- A wait never holds the GIL and ends at its deadline.
- A group that breaks or is late costs the other groups nothing but the wait up to that deadline.
- The group is dropped only when nothing is in flight: its destructor would wait for that with the GIL held. NCCL
  operations are aborted. gloo operations cannot be (measured: abort() changes nothing); they end by their own timeout.
- An engine that is blocked in a receive is freed when its group and its store are dropped.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
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
    Work,
)

from asyncrl.errors import WeightUpdateError
from asyncrl.observability.waits import WAITS

Backend = Literal["gloo", "nccl"]

_POLL_S = 0.0005


class TransferGroup:
    """Rank 0 of `world_size`. The constructor opens the store; `join` builds the group, once the engine has come."""

    def __init__(self, backend: Backend, name: str, world_size: int, host: str, timeout_s: float) -> None:
        self.backend = backend
        self.device = "cpu" if backend == "gloo" else "cuda"
        """Where broadcast tensors must be."""
        self.name = name
        self.world_size = world_size
        self.declined = False
        """Set in the event loop: the engine refused to come, so it is not waited for."""
        self.give_up_at = math.inf
        """Set in the event loop: the group is not wanted any more, and ends then (monotonic time) at the latest."""
        self.failure: str | None = None
        """Why the group cannot be used, once it cannot."""
        self._timeout = timedelta(seconds=timeout_s)
        self.timeout_s = timeout_s
        """For a bucket, and for the engine to join."""
        self._deadline = 0.0
        self._works: list[Work] = []
        """Operations in flight, oldest first. No other reference to them is kept: it would keep connections open."""
        self._group: Any = None  # a c10d Backend; its stub does not know `broadcast`
        # A store that opens its own socket listens on every interface, whatever host it is given.
        listener = socket.create_server((host, 0))
        self._store: TCPStore | None = TCPStore(
            host,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=self._timeout,
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

    def join(self) -> None:
        """Waits for every engine rank; raises WeightUpdateError when one does not come in time."""
        try:
            self._group = _process_group(self.backend, self._nested_store(), self.world_size, self._timeout)
        except RuntimeError as error:
            self.drop()
            # The frames of a kept traceback would keep the store, and engines that joined would wait on it.
            cause = error.with_traceback(None)
            raise WeightUpdateError(f"the weight transfer group did not form: {_first_line(error)}") from cause

    def _nested_store(self) -> Store:
        assert self._store is not None
        return PrefixStore(f"{self.device}/", PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store)))

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Begins to send `tensors`, each as one message; `ended` tells when that is over."""
        assert self._group is not None and not self._works
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        self._deadline = time.monotonic() + self.timeout_s
        try:
            for tensor in tensors:
                self._works.append(self._group.broadcast([tensor], options))
        except RuntimeError as error:
            self._fail(_first_line(error))

    def ended(self) -> bool:
        """Whether nothing is in flight any more: the engine has all tensors, or `failure` says why it has not."""
        while self._works and self._works[0].is_completed():
            try:
                self._works.pop(0).wait()
            except RuntimeError as error:
                self._fail(_first_line(error))
        if self._works and time.monotonic() > self._deadline:
            if self.failure is None and self.backend == "nccl":
                self._group.abort()
            self._fail(f"it did not take a weight bucket within {self.timeout_s:g} s")
            if time.monotonic() > self._deadline + self.timeout_s + 1.0:  # they should have ended by their own timeout
                self._works.clear()
        return not self._works

    def drop(self) -> None:
        """Leaves the group; idempotent."""
        if self._group is not None and self.backend == "nccl":
            self._group.abort()
        self._group = None
        self._store = None

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason


def join_all(groups: Iterable[TransferGroup], timeout_s: float) -> None:
    """Joins each group as soon as its engine has come; drops those whose engine declined, failed or is late.

    What was dropped has a `failure`.
    """
    waiting, deadline = list(groups), time.monotonic() + timeout_s
    with WAITS.register("weight transfer groups", "engines", timeout_s):
        while waiting:
            for group in tuple(waiting):
                late = time.monotonic() > min(deadline, group.give_up_at)
                has_come, wanted = group.engine_has_come, not group.declined and group.give_up_at == math.inf
                if has_come and wanted:
                    try:
                        group.join()
                    except WeightUpdateError as error:
                        group.failure = str(error)
                elif has_come or group.declined or late:
                    group.failure = f"it did not come to the weight transfer group within {timeout_s:g} s"
                    group.drop()
                else:
                    continue
                waiting.remove(group)
            time.sleep(_POLL_S if waiting else 0.0)


def broadcast(groups: Mapping[str, TransferGroup], tensors: Sequence[Tensor]) -> None:
    """Sends `tensors` to all groups at once (engine id → group), and returns when that has ended in each.

    A group that broke is dropped, and has a `failure`.
    """
    sending = list(groups.values())
    with WAITS.register("weight bucket", ", ".join(groups), max(group.timeout_s for group in sending)):
        for group in sending:
            group.begin(tensors)
        while sending:
            for group in tuple(sending):
                if group.ended():
                    sending.remove(group)
                    if group.failure is not None:
                        group.drop()
            time.sleep(_POLL_S if sending else 0.0)
        if any(group.backend == "nccl" for group in groups.values()):
            torch.cuda.current_stream().synchronize()


def drop_all(groups: Iterable[TransferGroup]) -> None:
    """Leaves all groups."""
    for group in groups:
        group.drop()


def _process_group(
    backend: Backend, store: Store, world_size: int, timeout: timedelta
) -> ProcessGroupGloo | ProcessGroupNCCL:
    if backend == "gloo":
        return ProcessGroupGloo(store, 0, world_size, timeout)
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, 0, world_size, options)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
