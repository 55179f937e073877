"""A process group of rank 0 that behaves over gloo as NCCL's does by its sources, and may block at any of its calls.

It forms in its first broadcast, and a broadcast ends when it was received. A call that blocks does so as C++ does:
neither a signal nor a deadline ends it.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroupGloo, Store

from asyncrl.weights.transports import process_group

_TIMEOUT = timedelta(seconds=2)
"""Threads of a test must end some time."""

CALLS = ("constructor", "broadcast", "work", "is_completed", "wait", "abort", "destructor")


class Blocks:
    """Which call of which groups blocks."""

    def __init__(self) -> None:
        self.call: str | None = None
        self.world_size = 0
        """Of the groups in question."""
        self.nth = 1
        """Number of the broadcast of a group whose own calls block; the first one proves the group."""
        self.once = False
        """Only the first group that comes there blocks."""
        self.reached = threading.Event()
        self.reached_at = 0.0
        """Monotonic time."""
        self.free = threading.Event()
        """Set at the end of the test."""
        self.operation_timeouts: set[timedelta] = set()
        self.watched: list[bool] = []
        """Of each group, whether torch would have made a watchdog for it."""

    def at(self, call: str, world_size: int, nth: int = 1) -> None:
        """Blocks where a group of this world size is in this call."""
        if self.once and self.reached.is_set():
            return
        if self.call == call and self.world_size == world_size and nth >= self.nth:
            self.reached_at = self.reached_at or time.monotonic()
            self.reached.set()
            self.free.wait()


class FakeNccl:
    """See the module's docstring."""

    def __init__(self, blocks: Blocks, store: Store, world_size: int) -> None:
        self._blocks, self._store, self._world_size = blocks, store, world_size
        self._group: Any = None
        self._broadcasts = 0
        self._aborted = False
        blocks.at("constructor", world_size)
        blocks.watched.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1")

    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions) -> FakeWork:
        self._broadcasts += 1
        self._blocks.at("broadcast", self._world_size, self._broadcasts)
        if self._aborted:
            raise RuntimeError("NCCL communicator was aborted")
        self._blocks.operation_timeouts.add(options.timeout)
        if self._group is None:
            self._group = ProcessGroupGloo(self._store, 0, self._world_size, _TIMEOUT)
        options.timeout = _TIMEOUT
        work = [self._group.broadcast(tensors, options), self._group.allreduce([torch.zeros(1)])]
        self._blocks.at("work", self._world_size, self._broadcasts)
        return FakeWork(self, work, self._broadcasts)

    def abort(self) -> None:
        self._blocks.at("abort", self._world_size)
        self._aborted = True
        left, self._group = [self._group], None
        threading.Thread(target=left.clear, daemon=True).start()  # gloo's destructor waits for operations

    def __del__(self) -> None:
        self._blocks.at("destructor", self._world_size)


class FakeWork:
    """An operation of a `FakeNccl`."""

    def __init__(self, group: FakeNccl, work: list[Any], number: int) -> None:
        self._blocks, self._world_size = group._blocks, group._world_size
        self._work, self._number = work, number

    def is_completed(self) -> bool:
        self._blocks.at("is_completed", self._world_size, self._number)
        return all(work.is_completed() for work in self._work)

    def wait(self) -> None:
        self._blocks.at("wait", self._world_size, self._number)
        for work in self._work:
            work.wait()


def over_fake_nccl(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    """Makes every NCCL group of transfers such a one. Set `free` at the end."""
    blocks, make = Blocks(), process_group._process_group

    def fake(backend: process_group.Backend, store: Store, world_size: int, timeout_s: float) -> Any:
        if backend == "nccl":
            return FakeNccl(blocks, store, world_size)
        return make(backend, store, world_size, timeout_s)

    monkeypatch.setitem(process_group.DEVICES, "nccl", "cpu")
    monkeypatch.setattr(process_group, "_process_group", fake)
    return blocks
