"""Commands from rank 0 to the other ranks, over a gloo group of its own.

Invariants
- The group is used by one thread of each rank only (the trainer thread of rank 0, the main thread of the others)
  and for nothing else, so commands cannot mix with the trainer's collectives.
- Its timeout is a year: ranks wait in `receive` through rollouts of any length, at no CPU cost. That a peer died
  is noticed by the closed connection, there and on the rank link.
- Tensors of a batch travel as tensors; the rest as msgpack. Nothing is pickled.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any, cast, get_type_hints

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.data.batch import RolloutBatch
from asyncrl.training.ranks.commands import Command

CONTROL_TIMEOUT = timedelta(days=365)


class TensorHeader(msgspec.Struct, frozen=True):
    """A tensor that follows."""

    field: str
    dtype: str
    shape: tuple[int, ...]


class BatchHeader(msgspec.Struct, frozen=True):
    """A RolloutBatch without the contents of its tensors."""

    tensors: tuple[TensorHeader, ...]
    rest: dict[str, msgspec.Raw]
    """The other fields, each as msgpack."""


class Envelope(msgspec.Struct, frozen=True):
    seq: int
    command: Command
    batch: BatchHeader | None


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """What a rank receives."""

    seq: int
    command: Command
    batch: RolloutBatch | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Envelope).decode


class CommandChannel:
    """One rank's end. With a single rank there is no group, and `send` has nobody to send to."""

    def __init__(self, world_size: int) -> None:
        self._group: dist.ProcessGroup | None = None
        if world_size > 1:
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))

    def send(self, seq: int, command: Command, batch: RolloutBatch | None = None) -> None:
        """Rank 0: hands a command, and a batch where it takes one, to every rank."""
        if self._group is None:
            return
        header, tensors = (None, []) if batch is None else _split(batch)
        payload = torch.frombuffer(bytearray(_encode(Envelope(seq, command, header))), dtype=torch.uint8)
        self._broadcast(torch.tensor([payload.numel()]))
        self._broadcast(payload)
        for tensor in tensors:
            self._broadcast(tensor)

    def receive(self) -> Message:
        """Other ranks: waits for the next command."""
        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(size)
        payload = torch.empty(int(size.item()), dtype=torch.uint8)
        self._broadcast(payload)
        envelope = _decode(payload.numpy().tobytes())
        batch = None if envelope.batch is None else self._receive_batch(envelope.batch)
        return Message(envelope.seq, envelope.command, batch)

    def _receive_batch(self, header: BatchHeader) -> RolloutBatch:
        hints = get_type_hints(RolloutBatch)
        values: dict[str, Any] = {
            name: msgspec.msgpack.decode(raw, type=hints[name]) for name, raw in header.rest.items()
        }
        for tensor_header in header.tensors:
            tensor = torch.empty(tensor_header.shape, dtype=getattr(torch, tensor_header.dtype))
            self._broadcast(tensor)
            values[tensor_header.field] = tensor
        return RolloutBatch(**values)

    def _broadcast(self, tensor: Tensor) -> None:
        """In place; as bytes, since gloo does not know every dtype."""
        if tensor.numel():
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=self._group)


def _split(batch: RolloutBatch) -> tuple[BatchHeader, list[Tensor]]:
    headers: list[TensorHeader] = []
    tensors: list[Tensor] = []
    rest: dict[str, msgspec.Raw] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            headers.append(TensorHeader(field.name, str(value.dtype).removeprefix("torch."), tuple(value.shape)))
            tensors.append(value.detach().cpu().contiguous())
        else:
            rest[field.name] = msgspec.Raw(_encode(value))
    return BatchHeader(tuple(headers), rest), tensors
