"""A process group of rank 0 that behaves over gloo as NCCL's does by its sources, and may block at any of its calls.

It forms in its first broadcast, which only queues a message on the current stream and returns no operation. The stream
tells when the message was received. A call that blocks does so as C++ does: neither a signal nor a deadline ends it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroupGloo, Store

from asyncrl.weights.transports import broadcast_sink, process_group

_TIMEOUT = timedelta(seconds=2)
"""Threads of a test must end some time."""

CALLS = ("constructor", "broadcast", "work", "settle", "abort", "destructor")

_current = threading.local()


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
        self.computed: Callable[[], None] = lambda: None
        """Stands for the wait until the trainer's GPU has a bucket."""
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
        self.aborted = False
        blocks.at("constructor", world_size)
        blocks.watched.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1")

    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions) -> None:
        assert not options.asyncOp, "NCCL would send on a stream that nobody can wait for without the GIL"
        self._broadcasts += 1
        self._blocks.at("broadcast", self._world_size, self._broadcasts)
        if self.aborted:
            raise RuntimeError("NCCL communicator was aborted")
        self._blocks.operation_timeouts.add(options.timeout)
        if self._group is None:
            self._group = ProcessGroupGloo(self._store, 0, self._world_size, _TIMEOUT)
        options.timeout = _TIMEOUT
        work = [self._group.broadcast(tensors, options), self._group.allreduce([torch.zeros(1)])]
        self._blocks.at("work", self._world_size, self._broadcasts)
        _current.stream.queued.append((self, self._world_size, self._broadcasts, work))

    def abort(self) -> None:
        self._blocks.at("abort", self._world_size)
        self.aborted = True
        left, self._group = [self._group], None
        threading.Thread(target=left.clear, daemon=True).start()  # gloo's destructor waits for operations

    def __del__(self) -> None:
        self._blocks.at("destructor", self._world_size)


class FakeStream:
    """The stream of one group: what was broadcast while it was the thread's current stream."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.queued: list[tuple[FakeNccl, int, int, list[Any]]] = []

    @contextmanager
    def selected(self) -> Iterator[None]:
        _current.stream = self
        try:
            yield
        finally:
            del _current.stream

    def settle(self) -> None:
        """As on a GPU: nothing but its end or an abort ends a message, and an abort is no error here."""
        while self.queued:
            group, world_size, number, operations = self.queued.pop(0)
            self._blocks.at("settle", world_size, number)
            while not group.aborted and not all(operation.is_completed() for operation in operations):
                time.sleep(0.0005)
            if not group.aborted:
                for operation in operations:
                    operation.wait()


def over_fake_nccl(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    """Makes every NCCL group of transfers such a one. Set `free` at the end."""
    blocks, make = Blocks(), process_group._process_group

    def fake(backend: process_group.Backend, store: Store, world_size: int, timeout_s: float) -> Any:
        if backend == "nccl":
            return FakeNccl(blocks, store, world_size)
        return make(backend, store, world_size, timeout_s)

    monkeypatch.setitem(process_group.DEVICES, "nccl", "cpu")
    monkeypatch.setattr(process_group, "_process_group", fake)
    monkeypatch.setattr(process_group, "SendStream", lambda: FakeStream(blocks))
    monkeypatch.setattr(broadcast_sink, "wait_until_computed", lambda: blocks.computed())
    return blocks
