"""A trainer that is only a thread with tensors, and a fleet that only keeps account."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.lowlevel
import torch
from torch import Tensor

from asyncrl.data.fleet import EngineEndpoint, UpdateAck, UpdateLease
from asyncrl.errors import TrainerError
from asyncrl.training.ranks.trainer_thread import TrainerThread
from asyncrl.weights.buckets import TensorSpec
from asyncrl.weights.handover import Handover, Offer, Stopped, Taken
from asyncrl.weights.transfer import Payload, Sink, WatchedSink

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


class NoOtherRanks:
    """The other ranks of a trainer of one."""

    stacks: Mapping[int, str] = {}

    def listen(self, take: Callable[[int, Offer], None]) -> None: ...

    async def tell(self, ranks: Collection[int], message: Taken | Stopped) -> None: ...

    async def ask_stacks(self, timeout_s: float) -> None: ...


class ThreadSource:
    """A WeightSource of one rank; `exported` counts tensors that were walked past, taken or not."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.tensors = dict(tensors or random_tensors())
        self.exported = 0
        self.before_tensor: Callable[[int], None] | None = None
        """Called in the trainer thread with the tensor's number in this export, and with that of the end."""
        self.before_call: Callable[[str], None] | None = None
        """Called in the trainer thread with the name of what it is called for."""
        self.thread = TrainerThread()
        self.other_ranks = NoOtherRanks()
        self._specs = specs_of(self.tensors)

    @property
    def payload(self) -> Payload:
        return Payload(self._specs, self.export)

    async def call(self, function: Callable[..., T], *args: object, what: str, timeout_s: float) -> T:
        def run() -> T:
            if self.before_call is not None:
                self.before_call(what)
            return function(*args)

        return await self.thread.call(run, what=what, timeout_s=timeout_s)

    async def export(self, sink: Sink, timeout_s: float, handover: Handover | None = None) -> None:
        """As a `TrainGroup` does, gives up when the export has not gone on for `timeout_s`."""
        watched = WatchedSink(sink)
        job = self.thread.submit(lambda: self._walk(watched), what="export")
        left_s = timeout_s
        while left_s > 0 and not job.done:
            with anyio.move_on_after(left_s):
                await job.wait()
            left_s = timeout_s - watched.idle_s()
        if not job.done:
            job.abandon()
            raise TrainerError(f"trainer rank 0: exporting the weights did not go on for {timeout_s:g} s")
        job.result()

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
        if self.before_tensor is not None:
            self.before_tensor(len(self.tensors))
        if failure is not None:
            raise failure
        sink.finish()

    def close(self) -> None:
        self.thread.close()


class Nowhere:
    """A sink that keeps nothing."""

    def put(self, name: str, tensor: Tensor) -> None: ...

    def finish(self) -> None: ...


def payload_of(tensors: Mapping[str, Tensor]) -> Payload:
    """One whose export needs no trainer."""

    async def export(sink: Sink, timeout_s: float, handover: Handover | None = None) -> None:
        for name, tensor in tensors.items():
            sink.put(name, tensor)
        sink.finish()

    return Payload(specs_of(tensors), export)


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
    settle_s: float = 5.0
    in_use: frozenset[Path] = frozenset()
    directories: list[Path | None] = field(default_factory=list)
    """Of copies, by commit."""
    copies: dict[Path, bool | None] = field(default_factory=dict)
    """How the writing of each copy ended; None: not yet."""

    def copies_in_use(self) -> frozenset[Path]:
        return self.in_use

    def copy_written(self, directory: Path, complete: bool) -> None:
        assert self.copies.get(directory) is None, "its end was told before"
        self.copies[directory] = complete

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
        now = anyio.current_time()
        self.lease = UpdateLease(f"lease-{self.leases}", version, now, now + 60, live, self.settle_s)
        return self.lease

    async def commit_weight_update(
        self,
        lease_id: str,
        acks: Sequence[UpdateAck],
        directory: Path | None = None,
        *,
        copy_due: float | None = None,
    ) -> None:
        assert self.lease is not None and self.lease.lease_id == lease_id
        await self._hook("commit")
        self.directories.append(directory)
        if directory is not None:
            self.copies[directory] = True if copy_due is None else None
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
