"""The command channel: commands from rank 0 to the other ranks, over a gloo group that carries nothing else.

Invariants
- One thread of each rank uses the group: the trainer thread of rank 0, the main thread of the others. So commands
  cannot mix with the trainer's collectives.
- Its timeout is a year: ranks wait in `receive` through rollouts of any length, at no CPU cost. A closed connection
  tells that a peer died, here and on the rank link.
- Tensors of a batch travel as tensors, everything else as msgpack. Nothing is pickled.
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

    name: str
    column: bool
    """It is one of the batch's columns, not a field."""
    dtype: str
    shape: tuple[int, ...]


class BatchHeader(msgspec.Struct, frozen=True):
    """A RolloutBatch without the contents of its tensors."""

    tensors: tuple[TensorHeader, ...]
    rest: dict[str, msgspec.Raw]
    """The other fields, each as msgpack."""


class Envelope(msgspec.Struct, frozen=True):
    """A message without the contents of its tensors."""

    seq: int
    command: Command
    batch: BatchHeader | None


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """A command as a rank receives it."""

    seq: int
    command: Command
    batch: RolloutBatch | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Envelope).decode


class CommandChannel:
    """One rank's end. With a single rank there is no group, and `send` does nothing."""

    def __init__(self, world_size: int) -> None:
        self._group: dist.ProcessGroup | None = None
        if world_size > 1:
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))

    def send(self, seq: int, command: Command, batch: RolloutBatch | None = None) -> None:
        """On rank 0: sends a command, with a batch where it takes one, to every other rank."""
        if self._group is None:
            return
        header, tensors = (None, []) if batch is None else _split(batch)
        payload = torch.frombuffer(bytearray(_encode(Envelope(seq, command, header))), dtype=torch.uint8)
        self._broadcast(torch.tensor([payload.numel()]))
        self._broadcast(payload)
        for tensor in tensors:
            self._broadcast(tensor)

    def receive(self) -> Message:
        """On the other ranks: waits for the next command."""
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
        columns: dict[str, Tensor] = {}
        for tensor_header in header.tensors:
            tensor = torch.empty(tensor_header.shape, dtype=getattr(torch, tensor_header.dtype))
            self._broadcast(tensor)
            (columns if tensor_header.column else values)[tensor_header.name] = tensor
        return RolloutBatch(**values, columns=columns)

    def _broadcast(self, tensor: Tensor) -> None:
        """Broadcasts in place, as bytes, since gloo does not know every dtype."""
        if tensor.numel():
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=self._group)


def _split(batch: RolloutBatch) -> tuple[BatchHeader, list[Tensor]]:
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.name != "columns"}
    named = [(name, False, value) for name, value in fields.items() if isinstance(value, Tensor)]
    named += [(name, True, value) for name, value in batch.columns.items()]
    headers = tuple(
        TensorHeader(name, column, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, column, tensor in named
    )
    rest = {name: msgspec.Raw(_encode(value)) for name, value in fields.items() if not isinstance(value, Tensor)}
    return BatchHeader(headers, rest), [tensor.detach().cpu().contiguous() for _, _, tensor in named]
