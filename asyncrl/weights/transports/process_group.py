"""Rank 0's end of the process group {trainer, every engine TP rank}; everything here runs in the trainer thread.

The engines build their end with torch's own helper, so the keys of the rendezvous store must nest as that helper nests
them: PrefixStore(device) over PrefixStore(name) over PrefixStore(name). gloo and NCCL go through the same code.

Invariants
- A wait never holds the GIL and ends at its deadline.
- The group is dropped only when nothing is in flight: its destructor would wait for that with the GIL held. NCCL
  operations are aborted. gloo operations cannot be (measured: abort() changes nothing); they end by their own timeout.
- An engine that is blocked in a receive is freed when the group and its store are dropped.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
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
    """Rank 0 of `world_size`. The constructor opens the store; `join` builds the group, after engines were invited."""

    def __init__(self, backend: Backend, name: str, world_size: int, host: str, timeout_s: float) -> None:
        self.backend = backend
        self.device = "cpu" if backend == "gloo" else "cuda"
        """Where broadcast tensors must be."""
        self.name = name
        self.world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._timeout_s = timeout_s
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

    def join(self) -> None:
        """Waits for every engine rank; raises WeightUpdateError when one does not come in time."""
        try:
            with WAITS.register("weight transfer group", "engines", self._timeout_s):
                self._group = _process_group(self.backend, self._nested_store(), self.world_size, self._timeout)
        except RuntimeError as error:
            self.drop()
            # The frames of a kept traceback would keep the store, and engines that joined would wait on it.
            cause = error.with_traceback(None)
            raise WeightUpdateError(f"the weight transfer group did not form: {_first_line(error)}") from cause

    def _nested_store(self) -> Store:
        assert self._store is not None
        return PrefixStore(f"{self.device}/", PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store)))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Sends `tensors`, each as one message, and returns when all engine ranks have them."""
        assert self._group is not None
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        works: list[Work] = []
        with WAITS.register("weight bucket", "engines", self._timeout_s):
            try:
                works = [self._group.broadcast([tensor], options) for tensor in tensors]
                self._wait(works)
            except RuntimeError as error:
                raise WeightUpdateError(f"the weight broadcast broke: {_first_line(error)}") from error
            finally:
                _let_end(works, self._timeout_s)
                works.clear()  # a kept operation would keep the connections open, even in a traceback

    def _wait(self, works: list[Work]) -> None:
        """Takes operations off `works` as they end well; keeps no other reference to any."""
        deadline = time.monotonic() + self._timeout_s
        while works:
            if works[0].is_completed():
                works.pop(0).wait()
            elif time.monotonic() > deadline:
                if self.backend == "nccl":
                    self._group.abort()
                raise WeightUpdateError(f"no engine took a weight bucket within {self._timeout_s:g} s")
            else:
                time.sleep(_POLL_S)
        if self.backend == "nccl":
            torch.cuda.current_stream().synchronize()

    def drop(self) -> None:
        """Leaves the group; idempotent."""
        if self._group is not None and self.backend == "nccl":
            self._group.abort()
        self._group = None
        self._store = None


def _process_group(
    backend: Backend, store: Store, world_size: int, timeout: timedelta
) -> ProcessGroupGloo | ProcessGroupNCCL:
    if backend == "gloo":
        return ProcessGroupGloo(store, 0, world_size, timeout)
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, 0, world_size, options)


def _let_end(works: Sequence[Work], timeout_s: float) -> None:
    """Waits, without the GIL, until nothing is in flight; each operation ends by its own timeout at the latest."""
    deadline = time.monotonic() + timeout_s + 1.0
    while not all(work.is_completed() for work in works) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
