"""Writes one copy of the weights, tensor by tensor, in a thread of its own: the trainer hands tensors over.

Invariants
- Nothing here raises. Whatever goes wrong costs the copy: it is a warning, and `complete` stays False.
- The trainer waits for the disk no longer than its patience, all waits of one transfer together: a disk that hangs in
  the middle of a write costs the copy and that time.
- The thread lives while there is something to write. Nobody else touches the files before it is idle.
- Tensors are read until `finish` has returned, and not after it unless the copy was given up.
"""

from __future__ import annotations

import json
import shutil
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

import structlog
import torch
from torch import Tensor

from asyncrl.observability.waits import WAITS
from asyncrl.weights.buckets import TensorSpec

FILE = "model.safetensors"
PATIENCE_S = 10.0
"""While engines stand still."""
PATIENCE_S_PER_GB = 10.0
"""More of it while they do not: of a disk that writes 100 MB/s."""
BACKLOG_BYTES = 256 << 20
"""Handed over and not written: host memory, where the tensors come from a GPU."""
_RESERVE_BYTES = 4 << 20
_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_log = structlog.get_logger(__name__)


class CopyWriter:
    """Writes one safetensors file. Made in the event loop; `start`, `put` and `finish` as of a transport's sink.

    The format is a length (8 bytes, little endian), a JSON header with each tensor's dtype, shape and place, and the
    data (https://github.com/huggingface/safetensors). All of the header is known before the first tensor.
    """

    def __init__(self, directory: Path, specs: Sequence[TensorSpec], *, ahead: bool = False) -> None:
        """`ahead`: it is written before engines are paused, not beside the transfer."""
        self.directory = directory
        self.ahead = ahead
        self.complete = False
        self.gave_up = False
        """Whether the disk took longer than the patience."""
        self._specs = tuple(specs)
        self._header = _header(specs)
        self.size_bytes = len(self._header) + sum(spec.size_bytes for spec in specs)
        self.patience_s = PATIENCE_S + (PATIENCE_S_PER_GB * self.size_bytes / 1e9 if ahead else 0.0)
        """Longest that the trainer waits in one transfer."""
        self._patience_left_s = self.patience_s
        self._file: FileIO | None = None
        self._written = 0
        self._failed = False
        self._changed = threading.Condition()
        self._steps: deque[tuple[Callable[[], None], int]] = deque()
        """What the thread is to do next, with the bytes that it holds."""
        self._backlog_bytes = 0
        self._working = False

    # before the transfer, in whatever thread

    def lacking_bytes(self) -> int:
        """What the file needs beyond the blocks that it has. Raises OSError."""
        path = self.directory / FILE
        return max(0, self.size_bytes - (path.stat().st_size if path.exists() else 0))

    def reserve(self) -> None:
        """Gives the file its size, before engines stand still for the numbers. Whatever prevents it shows later."""
        with suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            with (self.directory / FILE).open("ab") as file:
                # Written, not allocated: what takes time are the pages in memory.
                while (missing := self.size_bytes - file.tell()) > 0:
                    file.write(bytes(min(missing, _RESERVE_BYTES)))

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether the thread is at nothing any more, after at most `timeout_s`; what it had not begun is dropped."""
        with self._changed:
            self._drop_steps()
            return self._changed.wait_for(lambda: not self._working, timeout_s)

    @property
    def idle(self) -> bool:
        return not self._working

    # the transfer, in the trainer thread

    def start(self) -> None:
        """Begins anew: what an earlier transfer or an older copy left is written over."""
        with self._changed:
            self.complete = False
            if self.gave_up:
                return
            self._drop_steps()
            self._failed = False
            self._patience_left_s = self.patience_s
        self._hand_over(self._open)

    def put(self, name: str, tensor: Tensor) -> None:
        if self._failed:
            return
        on_host = tensor.detach().cpu().contiguous()  # a GPU belongs to this thread
        self._hand_over(lambda: self._write(name, on_host), on_host.nbytes)

    def finish(self) -> None:
        """Returns once all of it is written, or was given up."""
        self._hand_over(self._close)
        with self._changed:
            self._wait(lambda: not self._working)

    def give_up(self) -> None:
        """From whatever thread: the trainer waits for the disk no more. Another `start` begins anew."""
        with self._changed:
            self._failed = True
            self._drop_steps()
            self._changed.notify_all()

    def _hand_over(self, step: Callable[[], None], size_bytes: int = 0) -> None:
        with self._changed:
            self._wait(lambda: self._backlog_bytes == 0 or self._backlog_bytes + size_bytes <= BACKLOG_BYTES)
            if self._failed:
                return
            self._steps.append((step, size_bytes))
            self._backlog_bytes += size_bytes
            if not self._working:
                self._working = True
                # A daemon, never joined without a bound: a disk that hangs cannot hold the process.
                threading.Thread(target=self._work, name="copy of the weights", daemon=True).start()

    def _wait(self, satisfied: Callable[[], bool]) -> None:
        """Out of patience, gives the copy up. Holds the lock."""
        if satisfied():
            return
        began = time.monotonic()
        with WAITS.register("copy of the weights", f"the disk of {self.directory}", self._patience_left_s):
            done = self._changed.wait_for(lambda: satisfied() or self._failed, max(0.0, self._patience_left_s))
        self._patience_left_s -= time.monotonic() - began
        if not done:
            self.gave_up = True
            self._fail(f"the disk took longer than {self.patience_s:.0f} s")

    # the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._steps:
                    self._working = False
                    self._changed.notify_all()
                    return
                step, size_bytes = self._steps.popleft()
            try:
                step()
            except OSError as error:
                if self._file is not None:
                    self._file.close()
                shutil.rmtree(self.directory, ignore_errors=True)
                with self._changed:
                    self._fail(str(error))
            del step  # and the tensor with it
            with self._changed:
                self._backlog_bytes = max(0, self._backlog_bytes - size_bytes)
                self._changed.notify_all()

    def _open(self) -> None:
        if self._file is not None:
            self._file.close()
        self._written = 0
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / FILE
        # Unbuffered: what a writer that was given up still held would end up in the file of the next.
        self._file = path.open("r+b" if path.exists() else "wb", buffering=0)
        _write_all(self._file, self._header)

    def _write(self, name: str, tensor: Tensor) -> None:
        assert self._file is not None
        expected = self._specs[self._written].name
        if name != expected:
            raise OSError(f"tensor {name} came where {expected} was expected")
        _write_all(self._file, tensor.reshape(-1).view(torch.uint8).numpy().data)
        self._written += 1

    def _close(self) -> None:
        assert self._file is not None
        self._file.truncate()
        self._file.close()
        self.complete = self._written == len(self._specs) and not self._failed

    def _drop_steps(self) -> None:
        self._backlog_bytes -= sum(size_bytes for _, size_bytes in self._steps)
        self._steps.clear()

    def _fail(self, reason: str) -> None:
        """Holds the lock. The first reason is told."""
        if self._failed:
            return
        self._failed = True
        self._drop_steps()
        _log.warning(
            "no copy of the published weights: an engine that is started again waits for the next publication",
            directory=str(self.directory.parent),
            reason=reason,
        )


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _header(specs: Sequence[TensorSpec]) -> bytes:
    offset, entries = 0, {}
    for spec in specs:
        end = offset + spec.size_bytes
        dtype = _SAFETENSORS_DTYPES[spec.dtype]
        entries[spec.name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
