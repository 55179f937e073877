"""The thread that makes all calls to one process group, because none of these calls need return.

NCCL builds its communicator inside the first broadcast; its abort and its destructor wait for threads of its own. Each
may block in C++ for ever. torch lets go of the GIL in all of them, so only this thread stands still.

Invariants
- No call is made that keeps the GIL: an operation is waited for, and never polled with `is_completed`.
- The tensors of a message stay until the message has ended, also where the group was left: a kernel may read them.
- Nobody waits for this thread without a deadline. A thread that does not come back stays behind with its group.
- The group and its operations are known to this thread, so their destructors run here.
- An abort must reach a call that does not return, so it has a second thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions

from asyncrl.tasks import MAY_NOT_RETURN
from asyncrl.weights.transports.gpu_stream import SendStream


class Wire:
    """One process group of rank 0, and the thread that calls it.

    Args:
        make: makes the group.
        stream: of an NCCL group, for all that it sends. None for gloo, whose operations cannot be aborted.
    """

    def __init__(self, name: str, make: Callable[[], Any], stream: SendStream | None = None) -> None:
        self.left = threading.Event()
        """Set once the group is gone, and its connections with it."""
        self._make = make
        self._stream = stream
        self._group: Any = None  # a c10d Backend; its stub does not know `broadcast`
        self._failed: Callable[[], None] | None = None
        self._leaving = False
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._main, name=MAY_NOT_RETURN + name, daemon=True).start()

    def form(self, make_proof: Callable[[], Sequence[Tensor]], options: BroadcastOptions) -> Future[None]:
        """Makes the group, and sends tensors that prove it, where there are any."""

        def form() -> None:
            self._group = self._make()
            self._broadcast(make_proof(), options)

        return self._do(form)

    def broadcast(self, tensors: Sequence[Tensor], options: BroadcastOptions) -> Future[None]:
        """Sends tensors, each as one message; done when all have been received, or with why they have not."""
        return self._do(lambda: self._broadcast(tensors, options))

    def leave(self) -> None:
        """Drops the group, at once where nothing is under way. Waits for nothing; `left` tells."""
        self._leaving = True
        self._calls.put(None)
        if self._stream is not None:
            threading.Thread(target=self._abort, name=MAY_NOT_RETURN + "abort", daemon=True).start()

    def _broadcast(self, tensors: Sequence[Tensor], options: BroadcastOptions) -> None:
        works = [self._group.broadcast([tensor], options) for tensor in tensors]
        for work in works:
            if work is not None and not self._leaving:
                work.wait()
        if self._stream is not None and tensors:
            self._stream.settle()

    def _do(self, call: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        self._calls.put((call, done))
        return done

    def _abort(self) -> None:
        group = self._group
        if group is not None:
            with suppress(RuntimeError):
                group.abort()

    def _main(self) -> None:
        while (job := self._calls.get()) is not None and not self._leaving:
            call, done = job
            try:
                with nullcontext() if self._stream is None else self._stream.selected():
                    call()
            except Exception as error:
                # The frames of a kept traceback would keep group and store, and an engine would wait for them.
                done.set_exception(error.with_traceback(None))
                self._failed = call  # its first messages may be under way
            else:
                done.set_result(None)
            del job, call, done
        job = None
        self._make = _nothing
        if self._stream is not None:  # the other thread may come too late
            self._abort()
        self._group = self._failed = None
        self.left.set()


def _nothing() -> Any:
    raise AssertionError("the group was left")
