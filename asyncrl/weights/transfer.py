"""What a publication is made of: a payload, the engines that take it, and the transport between them.

A transport has two halves. The driver half (async) tells the engines what comes. The trainer half is a `Sink`: rank 0
feeds it, tensor by tensor, in the trainer thread. The halves meet in the wire and in a `TransferResult`. Where engines
read from several ranks (`Handover`), those have sinks of their own.

The weight plane knows the trainer by its `Payload` and by nothing else. An adapter is another payload: it has other
tensors and another export, and transports, copies and publisher stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeVar

import anyio
from torch import Tensor

from asyncrl.data.fleet import EngineEndpoint
from asyncrl.errors import EngineError, WeightUpdateError
from asyncrl.weights.buckets import Bucket, TensorSpec, plan_buckets
from asyncrl.weights.handover import Handover, OtherRanks

T = TypeVar("T")


class Sink(Protocol):
    """Takes the exported tensors in the trainer thread of rank 0.

    A sink that raises gets nothing more. The exporting rank still walks to the end of the export.
    """

    def put(self, name: str, tensor: Tensor) -> None:
        """Takes the next tensor. The exporter neither changes nor reuses it before the export has ended."""

    def finish(self) -> None:
        """Called once after the last tensor."""


class WatchedSink:
    """Hands everything on to another sink, and knows how long ago an export last went on."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._moved_at = time.monotonic()

    def idle_s(self) -> float:
        """Seconds since a tensor last came or was taken; any thread may ask."""
        return time.monotonic() - self._moved_at

    def put(self, name: str, tensor: Tensor) -> None:
        """See `Sink`."""
        self._moved_at = time.monotonic()
        self._sink.put(name, tensor)
        self._moved_at = time.monotonic()

    def finish(self) -> None:
        """See `Sink`."""
        self._sink.finish()


class Export(Protocol):
    """Exports all tensors once, on all ranks."""

    async def __call__(self, sink: Sink, timeout_s: float, handover: Handover | None = None) -> None:
        """Exports into `sink` of rank 0; with a `handover`, other ranks offer their tensors too. See `Payload`."""


@dataclass(frozen=True, slots=True)
class Payload:
    """The tensors of a publication, and how the trainer exports them."""

    specs: tuple[TensorSpec, ...]
    """Every tensor, in the order in which `export` delivers them; the same in each export."""
    export: Export
    """Exports once, on all ranks; gives up when it has not gone on for so many seconds.

    It goes on whenever the sink takes a tensor. A sink that waits in `put` for longer ends the trainer.

    Raises what the sink raised, after every rank has reached the end of the export; TrainerError when a rank failed.
    """

    @property
    def size_bytes(self) -> int:
        """Size of all tensors."""
        return sum(spec.size_bytes for spec in self.specs)


class WeightSource(Protocol):
    """The trainer as the weight plane sees it; `TrainGroup` is one."""

    @property
    def payload(self) -> Payload:
        """What the trainer publishes."""

    @property
    def other_ranks(self) -> OtherRanks:
        """The ranks that may take part in a `Handover` beside rank 0."""

    async def call(self, function: Callable[..., T], *args: object, what: str, timeout_s: float) -> T:
        """Runs `function` in the trainer thread of rank 0; raises TimeoutError after `timeout_s`."""


class WeightReceiver(Protocol):
    """The part of an engine's control API that carries weights; the inference package's client has this shape.

    Every call raises EngineError: with a status where the engine refused, without one where it gave no answer.
    """

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
        """Has every rank of the engine join the process group; returns when it has formed."""

    async def destroy_weights_group(self, group_name: str, timeout_s: float = ...) -> None:
        """Has the engine leave the group."""

    async def update_from_distributed(
        self, tensors: Sequence[TensorSpec], *, group_name: str, flattened: bool, flush_cache: bool, timeout_s: float
    ) -> None:
        """Receives one bucket over the group and loads it; `flattened`: it comes as one message of bytes."""

    async def update_from_tensor(
        self, serialized_named_tensors: Sequence[str], *, flattened: bool, flush_cache: bool, timeout_s: float = ...
    ) -> None:
        """Loads one bucket from memory of this machine; one handle for each rank of the engine."""

    async def update_from_disk(self, model_path: str, *, flush_cache: bool = ..., timeout_s: float = ...) -> None:
        """Loads all tensors from a directory of safetensors files."""


EngineOpener = Callable[[str, str], AbstractAsyncContextManager[WeightReceiver]]
"""Opens a client for (engine_id, url)."""


class TransferFault(StrEnum):
    """What an engine's failure says about the engine."""

    GONE = "gone"
    """No answer: dead, hung or unreachable. Not asked again in this publication."""
    REFUSED = "refused"
    """It answered with an error of its own."""
    COLLATERAL = "collateral"
    """It lost the transfer because the trainer's side or another engine broke it; it may be tried again."""


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """Why an engine did not receive everything."""

    kind: TransferFault
    reason: str


@dataclass(frozen=True, slots=True)
class TransferResult:
    """How one transfer ended."""

    bytes_sent: int
    """Size of the payload once, whatever the number of engines."""
    failures: Mapping[str, EngineFailure] = field(default_factory=dict)
    """By engine_id; an engine that is not named here received everything."""
    source_error: str | None = None
    """Why the trainer's side of the wire broke, where it did."""
    touched: bool = True
    """False when no engine can have received anything."""


class Transport(Protocol):
    """One way of moving all tensors from the trainer into engines that are paused and have an open session."""

    @property
    def leaves_copy(self) -> bool:
        """Whether a transfer leaves all tensors in a directory, which engines can load later."""

    @property
    def copy(self) -> Path | None:
        """The directory of the last transfer; None before the first, and for a transport that leaves none."""

    async def transfer(
        self,
        source: WeightSource,
        payload: Payload,
        engines: Sequence[EngineEndpoint],
        in_use: Collection[Path] = (),
    ) -> TransferResult:
        """Moves all of `payload` once, which is of `source`. Only a failed trainer rank raises (TrainerError).

        A failure of an engine or of the wire is in the result. `in_use` are directories of earlier transfers that
        engines still read, or may read again: they stay as they are.
        """

    async def abandon(self, engines: Sequence[EngineEndpoint]) -> None:
        """Frees every engine that is still blocked in a transfer that was cancelled or failed. Idempotent."""

    async def aclose(self) -> None:
        """Gives back what the transport keeps between publications. Idempotent."""


def engine_failure(error: EngineError, *, broken_before: bool = False) -> EngineFailure:
    """Classifies a control call that failed; `broken_before`: the wire was already known to be broken."""
    if getattr(error, "status", None) is None:
        return EngineFailure(TransferFault.GONE, str(error))
    return EngineFailure(TransferFault.COLLATERAL if broken_before else TransferFault.REFUSED, str(error))


@asynccontextmanager
async def open_clients(
    open_engine: EngineOpener, engines: Sequence[EngineEndpoint]
) -> AsyncIterator[dict[EngineEndpoint, WeightReceiver]]:
    """A client for each engine."""
    async with AsyncExitStack() as stack:
        yield {e: await stack.enter_async_context(open_engine(e.engine_id, e.url)) for e in engines}


async def on_each_engine(
    clients: Mapping[EngineEndpoint, WeightReceiver], call: Callable[[WeightReceiver, EngineEndpoint], Awaitable[None]]
) -> dict[str, EngineFailure]:
    """Makes `call` on all engines at once; returns those that failed."""
    failures: dict[str, EngineFailure] = {}

    async def one(engine: EngineEndpoint, client: WeightReceiver) -> None:
        try:
            await call(client, engine)
        except EngineError as error:
            failures[engine.engine_id] = engine_failure(error)

    async with anyio.create_task_group() as task_group:
        for engine, client in clients.items():
            task_group.start_soon(one, engine, client)
    return failures


class BucketFiller:
    """Collects exported tensors into the buckets of a plan, and checks each tensor against the plan.

    An engine ignores a name that it does not know, and loads any data under a name that it knows. So a mismatch must
    end the transfer here.
    """

    def __init__(self, specs: Iterable[TensorSpec], bucket_bytes: int) -> None:
        self.buckets: tuple[Bucket, ...] = plan_buckets(specs, bucket_bytes)
        self._bucket = 0
        self._tensors: list[Tensor] = []

    def add(self, name: str, tensor: Tensor) -> tuple[int, list[Tensor]] | None:
        """Returns (bucket index, its tensors) when `tensor` completes a bucket, else None.

        Raises WeightUpdateError for a tensor that the plan does not have at this place.
        """
        if self._bucket == len(self.buckets):
            raise WeightUpdateError(f"the trainer exported {name}, which is not among its tensor specs")
        bucket = self.buckets[self._bucket]
        expected = bucket[len(self._tensors)]
        found = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if found != expected:
            raise WeightUpdateError(f"the trainer exported {found} where its tensor specs say {expected}")
        self._tensors.append(tensor)
        if len(self._tensors) < len(bucket):
            return None
        full, index = self._tensors, self._bucket
        self._tensors, self._bucket = [], index + 1
        return index, full

    def check_complete(self) -> None:
        """Raises WeightUpdateError when the export ended early."""
        if self._bucket < len(self.buckets):
            missing = self.buckets[self._bucket][len(self._tensors)]
            raise WeightUpdateError(f"the trainer's export ended before {missing.name}")
