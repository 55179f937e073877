"""The trainer's half of tensor handover on one rank: a bucket is copied into memory that its engine can open.

Invariants
- A bucket has memory of its own, shared once: one handle, whatever the number of its tensors. The weights themselves
  are never shared. On a GPU torch frees memory that was shared only when its reader has let go of it, so an engine that
  dies would keep the trainer's weights on the GPU; so it keeps one bucket.
- On a GPU each bucket has fresh memory. An engine may answer while its other tensor-parallel ranks still copy, and
  torch gives the memory out again once all have let go. On CPU there is one buffer: an engine that answers has copied.
- CPU memory is shared by file name (`file_system`). By default torch passes file descriptors with a key that only the
  trainer's own children have, and an engine that gets such a handle crashes (measured).
- A handle is made only for an engine that will be sent it: one that is never opened is never freed.
- Only handles are pickled. They are made here, and read by engines that this job started on this machine.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from asyncrl.weights.buckets import Bucket
from asyncrl.weights.handover import Desk, Handover, Offer
from asyncrl.weights.transfer import BucketFiller

_ALIGNMENT = 64
_DEVICE_ARGUMENT = 6
"""Place of the device among the arguments of torch's `rebuild_cuda_tensor`."""


class TensorSink:
    """Offers what one rank exports, one bucket at a time. Used in the thread that exports."""

    def __init__(self, filler: BucketFiller, handover: Handover, rank: int, desk: Desk) -> None:
        self._filler = filler
        self._handover = handover
        self._desk = desk
        self._offers = rank in handover.ranks
        self._buffer: Tensor | None = None

    def put(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor; a full bucket is offered, and waited for. Raises WeightUpdateError once stopped."""
        try:
            full = self._filler.add(name, tensor)
            if full is not None and self._offers:
                self._offer(*full)
        except Exception as error:
            self._desk.fail(self._handover.number, error)
            raise

    def finish(self) -> None:
        """Raises WeightUpdateError when the export was too short."""
        try:
            self._filler.check_complete()
        except Exception as error:
            self._desk.fail(self._handover.number, error)
            raise

    def _offer(self, index: int, tensors: Sequence[Tensor]) -> None:
        shared, places = self._share(self._filler.buckets[index], tensors)
        handles = pickle_handles({"flattened_tensor": shared, "metadata": places})
        self._offers = self._desk.offer(Offer(self._handover.number, index, handles), self._handover.wait_s)

    def _share(self, bucket: Bucket, tensors: Sequence[Tensor]) -> tuple[Tensor, list[SimpleNamespace]]:
        """The bucket in memory that another process can open: uint8 [n], and where each tensor lies in it.

        The places have the attributes that SGLang reads of a flattened bucket.
        """
        places, end = [], 0
        for spec, tensor in zip(bucket, tensors, strict=True):
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + spec.size_bytes
            places.append(
                SimpleNamespace(
                    name=spec.name,
                    shape=tensor.shape,
                    dtype=tensor.dtype,
                    start_idx=start,
                    end_idx=end,
                    numel=spec.size_bytes,
                )
            )
        shared = self._memory(end, tensors[0].device)
        for place, tensor in zip(places, tensors, strict=True):
            room = shared[place.start_idx : place.end_idx].view(tensor.dtype).view(tensor.shape)
            room.copy_(tensor.detach())
        return shared, places

    def _memory(self, size: int, device: torch.device) -> Tensor:
        if device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, device=device)
        if self._buffer is None or self._buffer.numel() < size:
            torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
            self._buffer = torch.empty(size, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        return self._buffer[:size]


def pickle_handles(value: Any) -> str:
    """`value` as SGLang's MultiprocessingSerializer reads it, with handles in place of tensors."""
    buffer = io.BytesIO()
    _HandlePickler(buffer).dump(value)
    return base64.b64encode(buffer.getvalue()).decode()


class _HandlePickler(ForkingPickler):
    """Names a GPU by its UUID: trainer and engine may number their visible GPUs differently. SGLang reads both."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, Tensor) or not value.is_cuda:
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        named = list(arguments)
        device = named[_DEVICE_ARGUMENT]
        if isinstance(device, int):  # else SGLang was imported here, which names it so itself
            named[_DEVICE_ARGUMENT] = str(torch.cuda.get_device_properties(device).uuid)
        return rebuild, tuple(named)
