"""Tensor handover: engines on the trainer's machine read a bucket from memory that they share with the trainer.

On a GPU an engine opens the trainer's tensors in place (CUDA IPC). A colocated engine needs that, since NCCL refuses
two ranks on one device. On CPU, buckets go through one shared-memory buffer.

Invariants
- A bucket stays untouched until every engine has answered: the trainer thread waits for that, with a deadline.
- CPU memory is shared by file name (`file_system`). By default torch passes file descriptors with a key that only the
  trainer's own children have, and an engine that gets such a handle crashes (measured).
- Only handles are pickled. They are made here, and read by engines that this job started on this machine.
"""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import anyio
import torch
import torch.multiprocessing
from anyio.streams.memory import MemoryObjectSendStream
from torch import Tensor

from asyncrl.data.fleet import EngineEndpoint
from asyncrl.errors import WeightUpdateError
from asyncrl.observability.waits import WAITS
from asyncrl.weights.buckets import Bucket
from asyncrl.weights.transfer import (
    BucketFiller,
    EngineFailure,
    EngineOpener,
    Payload,
    TransferResult,
    WeightReceiver,
    WeightSource,
    on_each_engine,
    open_clients,
)

_ALIGNMENT = 64

_RELEASE_GRACE_S = 5.0
"""How much longer the trainer thread waits than the calls to the engines may take."""


class TensorTransport:
    """See the module's docstring."""

    leaves_copy = False
    copy: Path | None = None

    def __init__(
        self, open_engine: EngineOpener, *, bucket_bytes: int, timeout_s: float, flush_cache: bool = True
    ) -> None:
        self._open_engine = open_engine
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._flush_cache = flush_cache
        self._sink: TensorSink | None = None

    async def transfer(
        self,
        source: WeightSource,
        payload: Payload,
        engines: Sequence[EngineEndpoint],
        in_use: Collection[Path] = (),
    ) -> TransferResult:
        """See `Transport`; every engine reads a bucket before the trainer makes the next one."""
        filler = BucketFiller(payload.specs, self._bucket_bytes)
        last = len(filler.buckets) - 1
        offers, taken = anyio.create_memory_object_stream[tuple[int, str]](1)
        self._sink = sink = TensorSink(filler, offers, self._timeout_s)
        failures: dict[str, EngineFailure] = {}
        raised: list[Exception] = []

        async def export() -> None:
            try:
                await payload.export(sink, 2 * self._timeout_s + _RELEASE_GRACE_S)
            except Exception as error:  # sorted below, outside the task group, which would wrap it
                raised.append(error)
            finally:
                offers.close()

        try:
            async with open_clients(self._open_engine, engines) as clients, anyio.create_task_group() as task_group:
                task_group.start_soon(export)
                async for index, handles in taken:
                    left = {e: client for e, client in clients.items() if e.engine_id not in failures}
                    failures |= await on_each_engine(
                        left, self._read_call(handles, flush_cache=self._flush_cache and index == last)
                    )
                    if len(failures) == len(clients):
                        sink.stop("every engine failed")
                    sink.release()
        finally:
            sink.stop("the transfer ended")
            taken.close()
        for error in raised:
            if not isinstance(error, WeightUpdateError):
                raise error
        source_error = None if not raised or len(failures) == len(engines) else str(raised[0])
        return TransferResult(sink.bytes_sent, failures, source_error, touched=sink.offered)

    def _read_call(
        self, handles: str, *, flush_cache: bool
    ) -> Callable[[WeightReceiver, EngineEndpoint], Awaitable[None]]:
        async def read(client: WeightReceiver, engine: EngineEndpoint) -> None:
            await client.update_from_tensor(
                [handles] * engine.tensor_parallel,
                flattened=False,
                flush_cache=flush_cache,
                timeout_s=self._timeout_s,
            )

        return read

    async def abandon(self, engines: Sequence[EngineEndpoint]) -> None:
        """Stops the export; engines wait for nothing here."""
        if self._sink is not None:
            self._sink.stop("the transfer was given up")
            self._sink = None

    async def aclose(self) -> None:
        """Stops an export that still runs."""
        await self.abandon(())


class TensorSink:
    """Offers one bucket at a time to the event loop and waits until it is released."""

    def __init__(self, filler: BucketFiller, offers: MemoryObjectSendStream[tuple[int, str]], timeout_s: float) -> None:
        self.bytes_sent = 0
        self.offered = False
        self._filler = filler
        self._offers = offers
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._released = threading.Event()
        self._stopped: str | None = None
        self._buffer: Tensor | None = None

    def stop(self, reason: str) -> None:
        """Called in the event loop: nothing more is offered. The first reason stays."""
        if self._stopped is None:
            self._stopped = reason
        self._released.set()

    def release(self) -> None:
        """Called in the event loop: every engine is done with the offered bucket."""
        self._released.set()

    def put(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor; a full bucket is offered, and waited for. Raises WeightUpdateError once stopped."""
        full = self._filler.add(name, tensor)
        if full is None:
            return
        index, tensors = full
        self._released.clear()
        if self._stopped is not None:
            raise WeightUpdateError(self._stopped)
        bucket = self._filler.buckets[index]
        shared = self._share(bucket, tensors)
        handles = _pickle([(spec.name, value) for spec, value in zip(bucket, shared, strict=True)])
        self.offered = True
        self._loop.call_soon_threadsafe(self._offer, index, handles)
        with WAITS.register("tensor handover", "engines", self._timeout_s):
            released = self._released.wait(self._timeout_s + _RELEASE_GRACE_S)
        if self._stopped is not None or not released:
            raise WeightUpdateError(self._stopped or f"engines did not take a bucket within {self._timeout_s:g} s")
        self.bytes_sent += sum(spec.size_bytes for spec in bucket)

    def finish(self) -> None:
        """Raises WeightUpdateError when the export was too short."""
        self._filler.check_complete()
        self._buffer = None

    def _offer(self, index: int, handles: str) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # stopped meanwhile
            self._offers.send_nowait((index, handles))

    def _share(self, bucket: Bucket, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, in memory that another process can open."""
        if tensors[0].is_cuda:
            return [tensor.detach().contiguous() for tensor in tensors]
        offsets, size = [], 0
        for spec in bucket:
            offsets.append(size)
            size += -(-spec.size_bytes // _ALIGNMENT) * _ALIGNMENT
        if self._buffer is None or self._buffer.numel() < size:
            torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
            self._buffer = torch.empty(size, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        shared = []
        for spec, tensor, offset in zip(bucket, tensors, offsets, strict=True):
            place = self._buffer[offset : offset + spec.size_bytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.detach())
            shared.append(place)
        return shared


def _pickle(named_tensors: list[tuple[str, Tensor]]) -> str:
    """Handles in the form that SGLang's MultiprocessingSerializer reads."""
    if named_tensors[0][1].is_cuda:
        # Handles must name a GPU by its UUID: trainer and engine may number their visible GPUs differently.
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(named_tensors)
    return base64.b64encode(buffer.getvalue()).decode()
