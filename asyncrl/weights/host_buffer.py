"""The exported tensors in host memory: taken during an export, and read afterwards to be written to disk.

Invariants
- All publications share one buffer, as large as the largest payload so far. Nothing else of the copies grows with the
  model. It lies in blocks: torch rounds page-locked memory up to a power of two, so one allocation could take twice as
  much as it holds.
- The buffer belongs to the newest recording, from its first tensor on. A reader that finds its recording `held` after
  it has read a byte has read a byte of that recording.
- Memory is taken before engines are paused. Where there is none, the copy is lost and the export is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import structlog
import torch
from torch import Tensor

from asyncrl.observability.text_plots import size
from asyncrl.weights.handover import Handover
from asyncrl.weights.transfer import Payload, Sink

BLOCK_BYTES = 64 << 20

_log = structlog.get_logger(__name__)


class HostBuffer:
    """Host memory for one payload at a time; on a machine with a GPU it is page-locked, so that GPUs write it fast."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.holder: Recording | None = None
        """The recording whose tensors lie here."""
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []

    @property
    def size_bytes(self) -> int:
        """Memory that is taken."""
        return sum(len(block) for block in self._blocks)

    def reserve(self, size_bytes: int) -> None:
        """Makes the buffer at least so large. Raises RuntimeError where the machine has no memory left."""
        if size_bytes > self.size_bytes:
            self.holder, self._blocks = None, []
            for start in range(0, size_bytes, self._block_bytes):
                size = min(self._block_bytes, size_bytes - start)
                block = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
                self._blocks.append(block.zero_())  # the kernel finds the pages now, not while engines stand still

    def release(self) -> None:
        """Gives the memory back; a reader that is at a block may end it. The next `reserve` takes it anew."""
        self.holder, self._blocks = None, []
        if torch.cuda.is_available():
            torch.accelerator.empty_host_cache()  # else torch keeps what is page-locked for the process

    def write(self, offset: int, data: Tensor) -> None:
        """Copies `data` (uint8 [n]) to `offset`; from a GPU it arrives later, in the order of its current stream."""
        while len(data):
            block, start = divmod(offset, self._block_bytes)
            room = self._blocks[block][start : start + len(data)]
            room.copy_(data[: len(room)], non_blocking=True)
            offset, data = offset + len(room), data[len(room) :]

    def read(self, size_bytes: int) -> Iterator[memoryview]:
        """The first `size_bytes`, block by block."""
        for number, block in enumerate(self._blocks):
            yield block[: max(0, size_bytes - number * self._block_bytes)].numpy().data


class Recording:
    """What one publication exports, on its way into the buffer."""

    def __init__(self, buffer: HostBuffer, payload: Payload) -> None:
        self.payload = payload
        """Stands in for the given one: each of its exports is also taken into the buffer, from the beginning."""
        self.complete = False
        """Whether the last export was taken to its end."""
        self._buffer = buffer

    @property
    def held(self) -> bool:
        """Whether the buffer still has these tensors."""
        return self._buffer.holder is self

    def reserve(self) -> None:
        """Takes the memory; runs in the trainer thread. Without memory nothing is recorded, with a warning."""
        payload, size_bytes = self.payload, self.payload.size_bytes

        async def export(sink: Sink, timeout_s: float, handover: Handover | None = None) -> None:
            await payload.export(_Recorder(self._buffer, self, sink), timeout_s, handover)

        try:
            self._buffer.reserve(size_bytes)
        except RuntimeError as error:
            told = "no host memory for a copy of the published weights"
            _log.warning(told, size=size(size_bytes), reason=str(error), advice="set weights.keep_published to never")
        else:
            self.payload = replace(payload, export=export)

    def read(self) -> Iterator[memoryview]:
        """The bytes of all tensors, in the order of the specs and without gaps, block by block."""
        return self._buffer.read(self.payload.size_bytes)

    def give_up(self) -> None:
        """Nobody wants these tensors any more: a reader stops after the block that it is at."""
        if self.held:
            self._buffer.holder = None


class _Recorder:
    """A sink in the trainer thread. The transport's sink gets each tensor first: engines wait for that."""

    def __init__(self, buffer: HostBuffer, recording: Recording, sink: Sink) -> None:
        self._buffer = buffer
        self._recording = recording
        self._sink = sink
        self._taken_bytes = 0

    def put(self, name: str, tensor: Tensor) -> None:
        if not self._taken_bytes:
            self._recording.complete, self._buffer.holder = False, self._recording
        self._sink.put(name, tensor)
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._buffer.write(self._taken_bytes, data)
        self._taken_bytes += len(data)

    def finish(self) -> None:
        self._sink.finish()
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._recording.complete = self._taken_bytes == self._recording.payload.size_bytes
