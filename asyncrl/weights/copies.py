"""A copy of the published weights on disk, for engines that join later.

Invariants
- A copy appears under its version's name complete or not at all, and is handed on only after that.
- A copy that cannot be written (a full disk) costs a warning and nothing else: the publication goes on without it.
- Of copies that nobody uses at most `KEPT` exist. One in use stays as it is, however old: an evaluation may be pinned
  to it, or an engine still reading it.
- The files of an older one are written over by the next: memory and blocks for 500 MiB of new files cost 1 s, new
  numbers in old files 0.07 s (measured, ext4). New files get theirs before engines are paused.
- A disk that does not answer in time costs the copy, never the publication; none is begun before it has answered.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TypeVar

import anyio.to_thread
import structlog
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.observability.waits import waiting
from asyncrl.weights.buckets import TensorSpec
from asyncrl.weights.transfer import Sink, WeightSource

KEPT = 2
LARGEST_BYTES = 2 << 30
"""Weights up to this size are kept where nothing else was asked for: writing them costs about 0.3 s of pause,
and the first three times up to 4 s before it."""
_FILE = "model.safetensors"
_RESERVE_BYTES = 4 << 20
_UNFINISHED = ".next"
"""Directory of the copy that is being written; also where the files of an old one wait for that."""
_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

T = TypeVar("T")
_log = structlog.get_logger(__name__)


def weights_directory(config: Config) -> Path:
    """Where a job's weights lie between its trainer and its engines; the same again when the job is restarted."""
    if config.weights.directory is None:
        return config.run.dir / "weights"
    run = hashlib.sha256(str(config.run.dir.absolute()).encode()).hexdigest()[:12]
    return config.weights.directory / f"asyncrl-{run}"


def make_copies(config: Config, *, engines: int) -> Copies | None:
    """The copies that `weights.keep_published` asks for, where `engines` engines serve the model."""
    match config.weights.keep_published:
        case "never":
            return None
        case "always":
            largest = None
        case "auto":
            largest = None if engines == 1 else LARGEST_BYTES
    return Copies(weights_directory(config) / "published", largest_bytes=largest)


class Copies:
    """The copies of one job; `directory` belongs to them alone."""

    def __init__(self, directory: Path, *, largest_bytes: int | None = None) -> None:
        """`largest_bytes`: weights beyond this size are not kept; None keeps all."""
        self._directory = directory.absolute()
        self._largest_bytes = largest_bytes
        self._complete: list[Path] = []
        self._at_disk = False
        """A thread is at work on the files, waited for or not."""

    def writer(self, specs: Sequence[TensorSpec]) -> CopyWriter | None:
        """What takes the tensors of one publication, one at a time; None where they are not kept."""
        if self._at_disk:
            return None
        size = sum(spec.size_bytes for spec in specs)
        if self._largest_bytes is not None and size > self._largest_bytes:
            return None
        return CopyWriter(self._directory / _UNFINISHED, specs)

    async def at_disk(self, what: str, step: Callable[[], T], timeout_s: float) -> T | None:
        """Takes `step` (`publish`, or a writer's `reserve`) in a thread; None where the disk takes longer."""

        def run() -> T:
            self._at_disk = True
            try:
                return step()
            finally:
                self._at_disk = False

        try:
            with waiting(what, f"the disk of {self._directory}", timeout_s):
                return await anyio.to_thread.run_sync(run, abandon_on_cancel=True)
        except TimeoutError as error:
            _log.warning("no copy of the published weights", directory=str(self._directory), reason=str(error))
            return None

    def publish(self, writer: CopyWriter, version: str, in_use: Collection[Path] = ()) -> Path | None:
        """The directory of a copy that is complete, under its final name; None where there is none.

        `in_use`: directories of copies that are to stay as they are.
        """
        if not writer.complete:
            return None
        final = self._directory / version
        if final in in_use:  # a version is published again with the same weights
            return final
        shutil.rmtree(final, ignore_errors=True)
        try:
            writer.directory.rename(final)
        except OSError as error:  # somebody removed it, or something stands in the way
            _log.warning("no copy of the published weights", directory=str(final), reason=str(error))
            return None
        self._complete = [*(path for path in self._complete if path != final), final]
        spare = [path for path in self._complete[:-1] if path not in in_use]
        for path in spare[: max(0, len(self._complete) - KEPT)]:
            self._complete.remove(path)
            if writer.directory.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):  # somebody removed it
                    path.rename(writer.directory)
        return final

    def remove(self) -> None:
        """Removes every copy, finished or not. Idempotent."""
        shutil.rmtree(self._directory, ignore_errors=True)


class CopyWriter:
    """Writes one safetensors file as the tensors come, in the trainer thread; never raises.

    The format is a length (8 bytes, little endian), a JSON header with each tensor's dtype, shape and place, and the
    data (https://github.com/huggingface/safetensors). All of the header is known before the first tensor.
    """

    def __init__(self, directory: Path, specs: Sequence[TensorSpec]) -> None:
        self.directory = directory
        self.complete = False
        self._specs = tuple(specs)
        self._header = _header(specs)
        self._written = 0
        self._file: FileIO | None = None
        self._failed = False

    def reserve(self) -> CopyWriter:
        """Gives the file its size, before engines stand still for the numbers. Whatever prevents it shows later."""
        size = len(self._header) + sum(spec.size_bytes for spec in self._specs)
        with suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            with (self.directory / _FILE).open("ab") as file:
                # Written, not allocated: what takes time are the pages in memory.
                while (missing := size - file.tell()) > 0:
                    file.write(bytes(min(missing, _RESERVE_BYTES)))
        return self

    def start(self) -> None:
        """Begins anew: what an earlier transfer or an older copy left is written over."""
        self.complete = self._failed = False
        self._written = 0
        self._attempt(self._open)

    def put(self, name: str, tensor: Tensor) -> None:
        self._attempt(lambda: self._write(name, tensor))

    def finish(self) -> None:
        self._attempt(self._close)

    def _open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / _FILE
        # Unbuffered: what a writer that was given up still held would end up in the file of the next.
        self._file = path.open("r+b" if path.exists() else "wb", buffering=0)
        _write_all(self._file, self._header)

    def _write(self, name: str, tensor: Tensor) -> None:
        assert self._file is not None
        expected = self._specs[self._written].name
        if name != expected:
            raise OSError(f"tensor {name} came where {expected} was expected")
        _write_all(self._file, tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._written += 1

    def _close(self) -> None:
        assert self._file is not None
        self._file.truncate()
        self._file.close()
        self.complete = self._written == len(self._specs)

    def _attempt(self, step: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            step()
        except OSError as error:
            self._failed = True
            if self._file is not None:
                self._file.close()
            shutil.rmtree(self.directory, ignore_errors=True)
            _log.warning(
                "no copy of the published weights: an engine that is started again waits for the next publication",
                directory=str(self.directory.parent),
                reason=str(error),
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


class CopyingSource:
    """A weight source of which every export is also written down."""

    def __init__(self, source: WeightSource, writer: CopyWriter) -> None:
        self._source = source
        self._writer = writer

    @property
    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        return self._source.tensor_specs

    async def call(self, function: Callable[..., T], *args: object, what: str, timeout_s: float) -> T:
        return await self._source.call(function, *args, what=what, timeout_s=timeout_s)

    async def export(self, sink: Sink, timeout_s: float) -> None:
        await self._source.export(_Both(sink, self._writer), timeout_s)


class _Both:
    """Gives the transport's sink each tensor first: engines are waiting for it."""

    def __init__(self, sink: Sink, writer: CopyWriter) -> None:
        self._sink = sink
        self._writer = writer
        self._started = False

    def put(self, name: str, tensor: Tensor) -> None:
        if not self._started:
            self._started = True
            self._writer.start()
        self._sink.put(name, tensor)
        self._writer.put(name, tensor)

    def finish(self) -> None:
        self._sink.finish()
        self._writer.finish()
