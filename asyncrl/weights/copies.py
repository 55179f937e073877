"""Copies of the published weights on disk, for engines that join later.

Invariants
- A copy appears under its version's name complete or not at all, and is handed on only after that.
- A copy that cannot be written (a full disk) costs a warning and nothing else: the publication goes on without it.
- Large weights are written before engines are paused, small ones beside the transfer: engines stand still for no disk.
- Of copies that nobody uses at most `KEPT` exist. One in use stays as it is, however old: an evaluation may be pinned
  to it, or an engine still reading it. A version that is published again gets a copy of its own: the one before may be
  what engines could not load.
- The files of an older one, those of a killed job among them, are written over by the next: memory and blocks for
  500 MiB of new files cost 1 s, new numbers in old files 0.07 s (measured, ext4).
- A disk that does not answer in time costs the copy, never the publication; none is begun before it has answered.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import anyio.to_thread
import structlog
from torch import Tensor

from asyncrl.config import Config
from asyncrl.observability.waits import waiting
from asyncrl.weights.buckets import TensorSpec
from asyncrl.weights.copy_writer import CopyWriter
from asyncrl.weights.transfer import Sink, WeightSource

KEPT = 2
AHEAD_BYTES = 2 << 30
"""Weights beyond this size are exported a second time for their copy, before engines are paused. Below it the copy is
written beside the transfer: the first three times up to 4 s of making files before it, after that next to nothing."""
EXPORT_TIMEOUT_S = 600.0
"""Of that export, beside what the disk may take."""
SETTLE_S = 5.0
"""For a writer that was broken off to end the write that it is at."""
_UNFINISHED = ".next"
"""Directory of the copy that is being written; also where the files of an old one wait for that."""

T = TypeVar("T")
_log = structlog.get_logger(__name__)


def weights_directory(config: Config) -> Path:
    """Where a job's weights lie between its trainer and its engines; the same again when the job is restarted."""
    if config.weights.directory is None:
        return config.run.dir / "weights"
    run = hashlib.sha256(str(config.run.dir.absolute()).encode()).hexdigest()[:12]
    return config.weights.directory / f"asyncrl-{run}"


def make_copies(config: Config) -> Copies | None:
    """The copies that `weights.keep_published` asks for."""
    if config.weights.keep_published == "never":
        return None
    return Copies(weights_directory(config) / "published", needs_room=config.weights.keep_published == "auto")


class Copies:
    """The copies of one job; `directory` belongs to them alone."""

    def __init__(self, directory: Path, *, needs_room: bool = True, ahead_bytes: int = AHEAD_BYTES) -> None:
        """`needs_room`: only where the disk holds as much again. `ahead_bytes`: larger ones are written ahead."""
        self._directory = directory.absolute()
        self._needs_room = needs_room
        self._ahead_bytes = ahead_bytes
        self._complete: list[Path] = []
        self._looked = False
        """Whether what an earlier attempt of the job left was taken over."""
        self._at_disk = False
        """A thread is at work on the files, waited for or not."""
        self._writer: CopyWriter | None = None
        """The last that was given out."""

    def writer(self, specs: Sequence[TensorSpec]) -> CopyWriter | None:
        """What takes the tensors of one publication, one at a time; None where they are not kept."""
        last = self._writer
        if self._at_disk or (last is not None and last.gave_up and (last.ahead or not last.idle)):
            return None  # it hangs, or took so long that trying again at each publication would cost more than it gives
        ahead = sum(spec.size_bytes for spec in specs) > self._ahead_bytes
        return CopyWriter(self._directory / _UNFINISHED, specs, ahead=ahead)

    async def at_disk(self, what: str, step: Callable[[], T], timeout_s: float) -> T | None:
        """Takes `step` (`prepare` or `publish`) in a thread; None where the disk takes longer."""

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
            _warn(self._directory, str(error))
            return None

    def prepare(self, writer: CopyWriter, in_use: Collection[Path] = ()) -> CopyWriter | None:
        """Makes room for a copy, in old ones where there is no other; None where there is none."""
        last, self._writer = self._writer, writer
        if last is not None and not last.wait_idle(SETTLE_S):
            _warn(self._directory, "the disk has not taken the last one yet")
            self._writer = last
            return None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if not self._looked:
                self._looked = True
                found = [path for path in self._directory.iterdir() if path != writer.directory and path.is_dir()]
                self._complete = sorted(found, key=lambda path: path.stat().st_mtime)
            while (lacking := writer.lacking_bytes()) > 0 and self._needs_room:
                free = shutil.disk_usage(self._directory).free
                if free >= lacking + writer.size_bytes:
                    break
                spare = [path for path in self._complete if path not in in_use]
                if not spare:
                    needed = lacking + writer.size_bytes
                    _warn(
                        self._directory,
                        f"{free / 1e9:.1f} GB are free, and {needed / 1e9:.1f} GB would have to be: the copy, and as "
                        "much again for others; set weights.directory to a larger disk, or weights.keep_published",
                    )
                    return None
                self._reuse(spare[0], writer)
        except OSError as error:
            _warn(self._directory, str(error))
            return None
        if not writer.ahead:
            writer.reserve()
        return writer

    def publish(self, writer: CopyWriter, version: str, in_use: Collection[Path] = ()) -> Path | None:
        """The directory of a copy that is complete, under its final name; None where there is none.

        `in_use`: directories of copies that are to stay as they are.
        """
        if not writer.complete:
            return None
        names = itertools.chain([version], (f"{version}-{again}" for again in itertools.count(2)))
        final = next(path for path in map(self._directory.joinpath, names) if path not in in_use)
        shutil.rmtree(final, ignore_errors=True)
        try:
            writer.directory.rename(final)
        except OSError as error:  # somebody removed it, or something stands in the way
            _warn(final, str(error))
            return None
        self._complete = [*(path for path in self._complete if path != final), final]
        spare = [path for path in self._complete[:-1] if path not in in_use]
        for path in spare[: max(0, len(self._complete) - KEPT)]:
            self._reuse(path, writer)
        return final

    def remove(self) -> None:
        """Removes every copy, finished or not. Idempotent."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _reuse(self, path: Path, writer: CopyWriter) -> None:
        """The files of an old copy become those of the next, or go where that has some."""
        self._complete.remove(path)
        if writer.directory.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):  # somebody removed it
                path.rename(writer.directory)


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
        await _export(self._source, _Both(sink, self._writer), self._writer, timeout_s)


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


async def write_ahead(source: WeightSource, writer: CopyWriter) -> None:
    """Exports once, into `writer` alone, while engines go on; raises TrainerError when a rank failed."""
    await source.call(writer.start, what="turn for the copy of the weights", timeout_s=EXPORT_TIMEOUT_S)
    await _export(source, writer, writer, EXPORT_TIMEOUT_S)


async def _export(source: WeightSource, sink: Sink, writer: CopyWriter, timeout_s: float) -> None:
    """One whose end nobody waits for any more leaves the trainer free for what comes after it."""
    try:
        await source.export(sink, timeout_s + writer.patience_s)
    except BaseException:  # a cancellation too
        writer.give_up()
        raise


def _warn(directory: Path, reason: str) -> None:
    _log.warning("no copy of the published weights", directory=str(directory), reason=reason)
