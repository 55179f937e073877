"""Cuts a model's tensors into transfer buckets: pure data, the same on every rank and for every engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor, as the Hugging Face checkpoint has it."""

    name: str
    dtype: str
    """torch's name without the prefix: float32, bfloat16."""
    shape: tuple[int, ...]

    @property
    def element_bytes(self) -> int:
        """Size of one number."""
        return _BYTES_PER_ELEMENT[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Size of its numbers."""
        size = self.element_bytes
        for n in self.shape:
            size *= n
        return size


_BUCKETS = 30
"""Each costs a request to every engine and its answer, whatever its size."""
_LEAST_BYTES, _MOST_BYTES = 64 << 20, 512 << 20
_SHARE_OF_GPU = 128
"""At most this part of a GPU's memory: the trainer holds a bucket twice while it is sent, an engine once."""

Bucket = tuple[TensorSpec, ...]


def bucket_size(model_bytes: int, gpu_bytes: int | None) -> int:
    """Bytes of a bucket where nobody says: about 30 buckets of 64 to 512 MiB, as a GPU of `gpu_bytes` spares them.

    None: on CPU, where all measurements of publications are of 64 MiB.
    """
    if gpu_bytes is None:
        return _LEAST_BYTES
    return min(max(model_bytes // _BUCKETS, _LEAST_BYTES), _MOST_BYTES, gpu_bytes // _SHARE_OF_GPU)


def plan_buckets(tensors: Iterable[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cuts `tensors`, in order, into runs of at most `bucket_bytes`; a larger tensor gets a bucket of its own."""
    buckets: list[Bucket] = []
    current: list[TensorSpec] = []
    size = 0
    for tensor in tensors:
        if current and size + tensor.size_bytes > bucket_bytes:
            buckets.append(tuple(current))
            current, size = [], 0
        current.append(tensor)
        size += tensor.size_bytes
    if current:
        buckets.append(tuple(current))
    return tuple(buckets)
