"""Runs a function on several trainer ranks, forked from a server that has done the heavy imports and opened no thread:
a world of two starts in a tenth of a second instead of ten, whatever the test process has done before. Functions and
arguments are sent by value."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

import cloudpickle
import torch.distributed as dist

from asyncrl.training.ranks.layout import RankLayout

COLLECTIVE_TIMEOUT = timedelta(seconds=30)
"""A rank whose peer is gone fails after this."""


_PRELOADED = [
    "pytest",
    "torch._dynamo",  # the trainer's first step imports it, at several seconds
    "asyncrl.training.megatron.backend",
    "tests.training.megatron.conftest",  # brings transformers and its models
    "tests.training.worlds",
    "tests.inference.conftest",  # what rank 0 has beside the trainer where a world has engines
    __name__,
]


class RankFailure(AssertionError):
    """A rank raised, died or hung; the message names it and carries its traceback."""


def run_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    world_size: int = 1,
    tensor_parallel: int = 1,
    timeout_s: float = 60.0,
) -> list[Any]:
    """Calls `function(layout, *arguments)` on every rank of a fresh gloo world and returns the results in order of
    rank.

    Raises:
        RankFailure: after `timeout_s` at the latest; no process is left behind.
    """
    server = fork_server()
    work = cloudpickle.dumps((function, arguments))
    port = meeting_port()
    readers, processes = [], []
    for rank in range(world_size):
        reader, writer = server.Pipe(duplex=False)
        layout = RankLayout(rank, world_size, rank, tensor_parallel)
        process = server.Process(target=_rank_main, args=(writer, layout, port, work), daemon=True)
        process.start()
        writer.close()
        readers.append(reader)
        processes.append(process)
    try:
        return _collect(readers, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(readers: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(readers):
        pending = [reader for rank, reader in enumerate(readers) if rank not in results]
        ready = wait(pending, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailure(f"ranks {[r for r in range(len(readers)) if r not in results]} did not answer in time")
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = readers.index(reader)
            try:
                ok, value = pickle.loads(reader.recv_bytes())
            except EOFError:
                raise RankFailure(f"rank {rank} died without a word") from None
            if not ok:
                raise RankFailure(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(readers))]


def fork_server() -> ForkServerContext:
    """The one server of the test session; it starts at the first use, with everything that ranks need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _rank_main(writer: Connection, layout: RankLayout, port: int, work: bytes) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        function, arguments = cloudpickle.loads(work)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=layout.rank,
            world_size=layout.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        answer = (True, function(layout, *arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    writer.send_bytes(cloudpickle.dumps(answer))
    writer.close()


def meeting_port() -> int:
    """A free port where no client of this machine nor server of a job is put: other tests run beside these."""
    while True:
        port = random.randrange(10_000, 20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
