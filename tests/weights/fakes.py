"""Both ends of a publication for tests: a trainer that is only a thread with tensors, a fleet that only keeps account,
and an engine that really joins the process group and really keeps what it receives."""

from __future__ import annotations

import base64
import io
import os
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from asyncrl.data.fleet import EngineEndpoint, UpdateAck, UpdateLease
from asyncrl.errors import EngineError
from asyncrl.training.trainer_thread import TrainerThread
from asyncrl.weights.buckets import TensorSpec
from asyncrl.weights.transfer import EngineControl, Sink

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

T = TypeVar("T")
Hook = Callable[[], Awaitable[None]]


def random_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Tensors of several sizes and dtypes: with buckets of 64 KiB, some travel flattened and some do not."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layer.{i}.weight": torch.randn(24, 32, generator=generator) for i in range(12)}
    tensors |= {f"layer.{i}.norm": torch.randn(33, generator=generator).bfloat16() for i in range(12)}
    tensors["big"] = torch.randn(400, 300, generator=generator)
    tensors["bigger"] = torch.randn(300, 400, generator=generator).bfloat16()
    tensors["scalar"] = torch.randn((), generator=generator)
    return tensors


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items())


class ThreadSource:
    """A WeightSource of one rank; `exported` counts tensors that were walked past, taken or not."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.tensors = dict(tensors or random_tensors())
        self.exported = 0
        self.before_tensor: Callable[[int], None] | None = None
        """Called in the trainer thread with the tensor's number in this export."""
        self.thread = TrainerThread()
        self._specs = specs_of(self.tensors)

    @property
    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        return self._specs

    async def call(self, function: Callable[..., T], *args: object, what: str, timeout_s: float) -> T:
        return await self.thread.call(function, *args, what=what, timeout_s=timeout_s)

    async def export(self, sink: Sink, timeout_s: float) -> None:
        await self.thread.call(self._walk, sink, what="export", timeout_s=timeout_s)

    def _walk(self, sink: Sink) -> None:
        failure: Exception | None = None
        for number, (name, tensor) in enumerate(self.tensors.items()):
            self.exported += 1
            if self.before_tensor is not None:
                self.before_tensor(number)
            if failure is None:
                try:
                    sink.put(name, tensor)
                except Exception as error:
                    failure = error
        if failure is not None:
            raise failure
        sink.finish()

    def close(self) -> None:
        self.thread.close()


@dataclass
class AccountingFleet:
    """A Fleet that keeps account: what is paused, under which lease, who serves what."""

    engines: tuple[EngineEndpoint, ...]
    paused: set[str] = field(default_factory=set)
    lease: UpdateLease | None = None
    serving: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    aborts: list[tuple[Mapping[str, str], bool]] = field(default_factory=list)
    hooks: dict[str, Hook] = field(default_factory=dict)
    """Run in the middle of `begin`, `commit` or `abort`."""
    leases: int = 0

    async def begin_weight_update(self, version: str) -> UpdateLease:
        assert self.lease is None, "the lease before was never given back"
        live = tuple(e for e in self.engines if e.engine_id not in self.lost)
        self.paused = {e.engine_id for e in live}
        try:
            await self._hook("begin")
        except BaseException:
            self.paused.clear()
            raise
        self.leases += 1
        self.lease = UpdateLease(f"lease-{self.leases}", version, anyio.current_time() + 60, live)
        return self.lease

    async def commit_weight_update(self, lease_id: str, acks: Sequence[UpdateAck]) -> None:
        assert self.lease is not None and self.lease.lease_id == lease_id
        await self._hook("commit")
        acked = {ack.engine_id for ack in acks}
        for engine in self.lease.engines:
            if engine.engine_id in acked:
                self.serving[engine.engine_id] = self.lease.version
            else:
                self._lose(engine.engine_id, "it was not acknowledged")
        self.paused.clear()
        self.lease = None

    async def abort_weight_update(self, lease_id: str, failed: Mapping[str, str], *, untouched: bool) -> None:
        if self.lease is None or self.lease.lease_id != lease_id:
            return
        self.aborts.append((failed, untouched))
        self.paused.clear()
        for engine in self.lease.engines:
            if engine.engine_id in failed:
                self._lose(engine.engine_id, failed[engine.engine_id])
            elif not untouched:
                self.serving.pop(engine.engine_id, None)
        self.lease = None
        await self._hook("abort")

    def _lose(self, engine_id: str, reason: str) -> None:
        self.lost[engine_id] = reason
        self.serving.pop(engine_id, None)

    async def _hook(self, name: str) -> None:
        await anyio.lowlevel.checkpoint()
        if name in self.hooks:
            await self.hooks[name]()
        await anyio.lowlevel.checkpoint()


class EngineFault(EngineError):
    """As the engine client raises it: without a status there was no answer."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


class GlooEngine:
    """An engine's control API over a real gloo group of its own; `loaded` is what it received."""

    def __init__(self, engine_id: str = "engine-0", generation: int = 1, tensor_parallel: int = 1) -> None:
        self.endpoint = EngineEndpoint(engine_id, generation, f"http://{engine_id}", tensor_parallel)
        self.loaded: dict[str, Tensor] = {}
        self.groups: dict[str, list[ProcessGroupGloo]] = {}
        self.joined: list[str] = []
        self.buckets = 0
        self.flushes: list[bool] = []
        self.flattened: list[bool] = []
        self.faults: dict[tuple[str, int], Callable[[], Awaitable[None]]] = {}
        """(step, which bucket) → what happens; steps: init, before, after (a bucket was received), disk, tensor."""

    async def init_weights_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float,
    ) -> None:
        await self._fault("init", 0)
        assert backend == "gloo"

        def join(rank: int) -> ProcessGroupGloo:
            timeout = timedelta(seconds=20)
            store = TCPStore(master_address, master_port, world_size, is_master=False, timeout=timeout)
            nested = PrefixStore("cpu/", PrefixStore(f"{group_name}/", PrefixStore(group_name, store)))
            return ProcessGroupGloo(nested, rank, world_size, timeout)

        ranks = range(rank_offset, rank_offset + self.endpoint.tensor_parallel)
        self.groups[group_name] = await self._on_all_ranks([partial(join, rank) for rank in ranks])
        self.joined.append(group_name)

    async def destroy_weights_group(self, group_name: str, timeout_s: float = 5.0) -> None:
        if self.groups.pop(group_name, None) is None:
            raise EngineFault(f"{self.endpoint.engine_id}: the group does not exist", 400)

    async def update_from_distributed(
        self, tensors: Sequence[TensorSpec], *, group_name: str, flattened: bool, flush_cache: bool, timeout_s: float
    ) -> None:
        await self._fault("before", self.buckets)
        if group_name not in self.groups:
            raise EngineFault(f"{self.endpoint.engine_id}: unknown group", 400)
        groups = self.groups[group_name]
        received = await self._on_all_ranks([partial(_receive, group, tensors, flattened) for group in groups])
        await self._fault("after", self.buckets)
        self.buckets += 1
        self.loaded |= received[0]
        self.flushes.append(flush_cache)
        self.flattened.append(flattened)

    async def update_from_tensor(
        self, serialized_named_tensors: Sequence[str], *, flattened: bool, flush_cache: bool, timeout_s: float = 5.0
    ) -> None:
        await self._fault("tensor", self.buckets)
        assert len(serialized_named_tensors) == self.endpoint.tensor_parallel
        named = pickle.load(io.BytesIO(base64.b64decode(serialized_named_tensors[0])))
        self.loaded |= {name: tensor.clone() for name, tensor in named}
        self.buckets += 1
        self.flushes.append(flush_cache)

    async def update_from_disk(self, model_path: str, *, flush_cache: bool = True, timeout_s: float = 5.0) -> None:
        await self._fault("disk", 0)
        self.loaded |= await anyio.to_thread.run_sync(_load, model_path)
        self.flushes.append(flush_cache)

    async def _fault(self, step: str, bucket: int) -> None:
        await anyio.lowlevel.checkpoint()
        if (step, bucket) in self.faults:
            await self.faults[step, bucket]()

    async def _on_all_ranks(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Runs each blocking call in a thread of its own, as the engine's TP ranks would."""
        results: list[T] = []
        errors: list[RuntimeError] = []

        async def one(call: Callable[[], T]) -> None:
            try:
                results.append(await anyio.to_thread.run_sync(call, abandon_on_cancel=True))
            except RuntimeError as error:
                errors.append(error)

        async with anyio.create_task_group() as task_group:
            for call in calls:
                task_group.start_soon(one, call)
        if errors:
            raise EngineFault(f"{self.endpoint.engine_id}: Failed to receive weights: {errors[0]}", 400)
        return results

    def refuse(self, step: str, bucket: int = 0) -> None:
        async def fault() -> None:
            del self.faults[step, bucket]
            raise EngineFault(f"{self.endpoint.engine_id}: refused at {step} {bucket}", 400)

        self.faults[step, bucket] = fault

    def die(self, step: str, bucket: int = 0) -> None:
        async def fault() -> None:
            self.groups.clear()  # its connections close
            raise EngineFault(f"{self.endpoint.engine_id}: connection lost", None)

        self.faults[step, bucket] = fault

    def hang(self, step: str, bucket: int = 0) -> None:
        self.faults[step, bucket] = anyio.sleep_forever


def opener(*engines: GlooEngine) -> Callable[[str, str], AbstractAsyncContextManager[EngineControl]]:
    by_id = {engine.endpoint.engine_id: engine for engine in engines}

    @asynccontextmanager
    async def open_engine(engine_id: str, url: str) -> AsyncIterator[EngineControl]:
        yield by_id[engine_id]

    return open_engine


def endpoints(engines: Iterable[GlooEngine]) -> tuple[EngineEndpoint, ...]:
    return tuple(engine.endpoint for engine in engines)


def _load(directory: str) -> dict[str, Tensor]:
    return {name: t for path in sorted(Path(directory).glob("*.safetensors")) for name, t in load_file(path).items()}


def _receive(group: ProcessGroupGloo, tensors: Sequence[TensorSpec], flattened: bool) -> dict[str, Tensor]:
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = timedelta(seconds=20)
    received = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in tensors}
    broadcast: Any = group
    if flattened:
        flat = torch.empty(sum(t.size_bytes for t in tensors), dtype=torch.uint8)
        broadcast.broadcast([flat], options).wait()
        offset = 0
        for t in tensors:
            received[t.name] = flat[offset : offset + t.size_bytes].view(getattr(torch, t.dtype)).view(t.shape)
            offset += t.size_bytes
        return received
    works = [broadcast.broadcast([tensor], options) for tensor in received.values()]
    for work in works:
        work.wait()
    return received
