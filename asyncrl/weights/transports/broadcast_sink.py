"""The trainer's half of a broadcast: fills buckets, and sends each full one to every engine that still takes part.

Invariants
- An engine whose group breaks gets nothing more, and the others get the bucket and those that follow.
- Over NCCL an engine is asked to receive a bucket only when that bucket is about to be sent. It answers as soon as its
  receive is queued on its GPU, and a receive that nothing is sent to would never end.
- Over NCCL a bucket is computed before it counts as due. So a rank that hangs in the export holds up the export, which
  has a deadline of its own, and no engine is blamed.
- The export ends in an error only when no engine is left, or when the trainer's own side failed or was stopped. All
  groups were left then.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from asyncrl.errors import WeightUpdateError
from asyncrl.tasks import Changes
from asyncrl.weights.buckets import Bucket
from asyncrl.weights.transfer import BucketFiller
from asyncrl.weights.transports.gpu_stream import wait_until_computed
from asyncrl.weights.transports.process_group import Backend, TransferGroup, broadcast, drop_all

LOST_GRACE_S = 0.5
"""How long an engine may take to answer after its own group broke. The others, which hold everything, wait for that: it
only tells an engine that lives from one that is gone."""

FLATTEN_BELOW_BYTES = 256 * 1024
"""A bucket of gloo whose mean tensor is smaller travels as one message. Larger tensors travel one by one: a copy of
them into one buffer costs more than the messages."""


def is_flattened(bucket: Bucket, backend: Backend = "gloo") -> bool:
    """Whether a bucket travels as one uint8 message; the trainer and the engines both go by this.

    Over NCCL it does so whatever its size. The GPU of rank 0 has one queue (`CUDA_DEVICE_MAX_CONNECTIONS`): a second
    message to an engine that hangs would stand in it before the first one to the next engine.
    """
    if len(bucket) == 1 or not _aligned(bucket):
        return False
    return backend == "nccl" or sum(t.size_bytes for t in bucket) < len(bucket) * FLATTEN_BELOW_BYTES


def _aligned(bucket: Bucket) -> bool:
    """Whether each tensor begins at a multiple of its element's size; an engine refuses another message."""
    offset = 0
    for spec in bucket:
        if offset % spec.element_bytes:
            return False
        offset += spec.size_bytes
    return True


class BroadcastSink:
    """The trainer's half: fills buckets and sends each full one. Made in the event loop, used in the trainer thread."""

    def __init__(self, groups: Mapping[str, TransferGroup], filler: BucketFiller, backend: Backend) -> None:
        """`groups` by engine id, of `backend`."""
        self.groups = groups
        self.backend: Backend = backend
        self.bytes_sent = 0
        self.broken: str | None = None
        """Why nothing more is sent to anybody; the event loop sets it too, and it is read between buckets."""
        self._filler = filler
        self._parted: set[str] = set()
        """Engines to which nothing more is sent; the event loop adds to it."""
        self._broke_at: dict[str, float] = {}
        """When an engine's group broke (monotonic time)."""
        self._due = len(filler.buckets) if backend == "gloo" else 0
        """How many buckets engines may be asked to receive."""
        self._changed = Changes()
        self._loop = asyncio.get_running_loop()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The plan, in the order of the export."""
        return self._filler.buckets

    def name_for(self, engine_id: str) -> str:
        """Name under which the engine knows its group."""
        return self.groups[engine_id].name

    def grace_s(self, engine_id: str) -> float:
        """How long the engine may still take to answer, for its own part: without end while its group is whole."""
        broke_at = self._broke_at.get(engine_id)
        return math.inf if broke_at is None else max(0.0, broke_at + LOST_GRACE_S - time.monotonic())

    def part_with(self, engine_id: str) -> None:
        """Nothing more is sent to this engine, and the present bucket is not waited for."""
        self.groups[engine_id].declined = True
        self._parted.add(engine_id)

    def fail(self, reason: str) -> None:
        """Stops the transfer at the next bucket; the first reason stays. Any thread may call it."""
        if self.broken is None:
            self.broken = reason
        self._loop.call_soon_threadsafe(self._changed.notify)

    async def due(self, index: int) -> bool:
        """Waits until engines may be asked to receive bucket `index`; False where it will not be sent."""
        while self.broken is None:
            if index < self._due:
                return True
            await self._changed.wait()
        return False

    def put(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor, and sends the bucket that it completes; leaves all groups before it raises."""
        try:
            full = self._filler.add(name, tensor)
            if full is not None:
                self._send(*full)
        except Exception as error:
            self._leave(error)
            raise

    def finish(self) -> None:
        """Raises WeightUpdateError when the export was too short, and leaves all groups first."""
        try:
            self._filler.check_complete()
        except WeightUpdateError as error:
            self._leave(error)
            raise

    def _send(self, index: int, tensors: list[Tensor]) -> None:
        if self.broken is not None:
            raise WeightUpdateError(self.broken)
        for engine_id in tuple(self._parted):
            self.groups[engine_id].drop()
        live = {engine_id: group for engine_id, group in self.groups.items() if group.alive}
        if live:
            device = next(iter(live.values())).device
            payload = [tensor.detach().to(device).contiguous() for tensor in tensors]
            if is_flattened(self.buckets[index], self.backend):
                payload = [torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in payload])]
            if self.backend == "nccl":
                wait_until_computed()
            self._due = max(self._due, index + 1)
            self._loop.call_soon_threadsafe(self._changed.notify)
            broadcast(live, payload)
            self.bytes_sent += sum(tensor.nbytes for tensor in payload)
        now = time.monotonic()
        self._broke_at |= {engine_id: now for engine_id, group in live.items() if not group.alive}
        if not any(group.alive for group in live.values()):
            told = [f"{engine_id}: {group.failure}" for engine_id, group in live.items()]
            raise WeightUpdateError("; ".join(told) or "no engine takes weights any more")

    def _leave(self, error: Exception) -> None:
        self.fail(str(error))
        drop_all(self.groups.values())
