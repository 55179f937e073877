"""The thread of a process group: how it waits, and what it keeps meanwhile."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import BroadcastOptions

from asyncrl.weights.transports.wire import Wire


class Operation:
    """An operation that can be waited for only: torch's `is_completed` keeps the GIL."""

    def __init__(self) -> None:
        self.waited = False

    def is_completed(self) -> bool:
        raise AssertionError("polled")

    def wait(self) -> None:
        self.waited = True


class Group:
    """Takes so many messages as `works` has; then it fails."""

    def __init__(self, works: list[Any]) -> None:
        self.works, self.aborted = iter(works), threading.Event()

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Any:
        for work in self.works:
            return work
        raise RuntimeError("refused")

    def abort(self) -> None:
        self.aborted.wait()


class Stream:
    """Has settled once `ended` is set."""

    def __init__(self) -> None:
        self.ended, self.settling, self.inside = threading.Event(), threading.Event(), False

    @contextmanager
    def selected(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def settle(self) -> None:
        assert self.inside
        self.settling.set()
        assert self.ended.wait(10)


def test_an_operation_is_never_polled() -> None:
    works = [Operation(), Operation()]
    wire = Wire("gloo", lambda: Group(works))
    wire.form(lambda: [], BroadcastOptions()).result(10)
    wire.broadcast([torch.zeros(1), torch.zeros(1)], BroadcastOptions()).result(10)
    assert all(work.waited for work in works)
    wire.leave()
    assert wire.left.wait(10)


@pytest.mark.parametrize("messages", [1, 2])
def test_what_a_kernel_may_read_stays_until_it_has_ended(messages: int) -> None:
    """Also where its group was left; of two messages the second one fails while the first is under way."""
    stream, group = Stream(), Group([None])
    wire = Wire("nccl", lambda: group, stream)  # type: ignore[arg-type]
    wire.form(lambda: [], BroadcastOptions()).result(10)
    tensors = [torch.zeros(1) for _ in range(messages)]
    read = weakref.ref(tensors[0])
    under_way = wire.broadcast(tensors, BroadcastOptions())
    del tensors
    if messages == 1:
        assert stream.settling.wait(10)
    else:
        assert isinstance(under_way.exception(10), RuntimeError)
    wire.leave()
    assert not wire.left.wait(0.1)
    assert read() is not None
    stream.ended.set()
    group.aborted.set()
    assert wire.left.wait(10)
    assert read() is None
