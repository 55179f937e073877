"""Copies of the published weights on disk, for engines that join later.

During the export the tensors go once into host memory (`host_buffer.py`). After the commit a thread writes them from
there, beside the training, and the fleet hears how that ended. Host memory of the size of the weights is the price.

    recording = copies.record(source.payload)         # before the pause; None where the disk hangs
    ...                                               # recording.payload is exported
    directory = copies.place("0.3", in_use)           # where the copy will be, for the commit
    copies.keep(recording, directory, fleet, due)     # after the commit; ends with fleet.copy_written(...)

Invariants
- A copy appears under its version's name complete or not at all. The fleet hears of its end once, whatever happens:
  complete, or given up.
- The newest version wins. From the first tensor of a publication on, a copy of older weights that is still being
  written is given up. So a disk that is slower than the training costs copies, and no step waits for it.
- A disk that is full or hangs costs the copy and a warning. After a deadline that passed, no copy is begun before the
  disk has answered.
- Of copies that nobody uses at most `KEPT` exist. One in use stays as it is, however old: an evaluation may be pinned
  to it, or an engine still reading it. A version that is published again gets a copy of its own: the one before may be
  what engines could not load.
- A copy that `leave_newest` moved away is no copy any more: it outlives the job.
- The next copy is written over the files of an old one, those of a killed job among them: memory and blocks for 500 MiB
  of new files cost 1 s, new numbers in old files 0.07 s (measured, ext4).
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import threading
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio
import anyio.from_thread
import anyio.to_thread
import structlog

from asyncrl.config import Config
from asyncrl.observability.text_plots import size
from asyncrl.observability.waits import waiting
from asyncrl.tasks import Background
from asyncrl.weights.copy_file import FILE, header, write_file
from asyncrl.weights.host_buffer import HostBuffer, Recording
from asyncrl.weights.left_behind import leave_behind, steps_of
from asyncrl.weights.transfer import Payload

KEPT = 2
REMOVE_TIMEOUT_S = 5.0
"""At the end of the job: for the block that is being written, and for the removal of the files."""
_LAST_WRITE_S = 2.0
"""At the end of the job: for a copy in progress that nothing else holds, before the one before it is taken."""
_UNFINISHED = ".next"
"""Directory of the copy that is being written; also where the files of an old one wait for that."""

_log = structlog.get_logger(__name__)


class Readers(Protocol):
    """The fleet as the copies see it."""

    def copies_in_use(self) -> frozenset[Path]:
        """Directories of copies that are to stay as they are: published, being loaded, or pinned for an evaluation."""

    def copy_written(self, directory: Path, complete: bool) -> None:
        """Tells that the copy of a commit is complete, or was given up."""


def weights_directory(config: Config) -> Path:
    """Where a job's weights lie between its trainer and its engines; the same again when the job is restarted."""
    if config.weights.directory is None:
        return config.run.dir / "weights"
    run = hashlib.sha256(str(config.run.dir.absolute()).encode()).hexdigest()[:12]
    return config.weights.directory / f"asyncrl-{run}"


def make_copies(config: Config, background: Background) -> Copies | None:
    """The copies that `weights.keep_published` asks for; they are written in tasks of `background`."""
    if config.weights.keep_published == "never":
        return None
    needs_room = config.weights.keep_published == "auto"
    return Copies(weights_directory(config) / "published", background, needs_room=needs_room)


class Copies:
    """The copies of one job; `directory` belongs to them alone. See the module's docstring."""

    def __init__(self, directory: Path, background: Background, *, needs_room: bool = True) -> None:
        """`needs_room`: a copy is kept only where the disk has room for it and for as much again."""
        self._directory = directory.absolute()
        self._unfinished = self._directory / _UNFINISHED
        self._background = background
        self._needs_room = needs_room
        self._buffer = HostBuffer()
        self._disk = threading.Lock()
        """Held by the thread that is at work in the directory. The event loop never takes it."""
        self._turns = anyio.CapacityLimiter(1)
        """Copies that are still awaited wait here for the disk, and not in threads."""
        self._overdue = False
        """A deadline has passed; the disk may have answered since."""
        self._closed = False
        self._complete: list[Path] = []
        """Oldest first."""
        self._looked = False
        """Whether the copies of an earlier attempt of the job were taken over."""

    def record(self, payload: Payload) -> Recording | None:
        """What takes the tensors of one publication; None, with a warning, while the disk does not answer."""
        self._overdue = self._overdue and self._disk.locked()
        if self._overdue:
            _warn(self._directory, "the disk has not answered yet")
            return None
        return Recording(self._buffer, payload)

    def place(self, version: str, in_use: Collection[Path]) -> Path:
        """The directory in which the copy of `version` will be: none that is in use."""
        names = itertools.chain([version], (f"{version}-{again}" for again in itertools.count(2)))
        return next(path for path in map(self._directory.joinpath, names) if path not in in_use)

    def keep(self, recording: Recording, directory: Path, readers: Readers, due: float) -> None:
        """Begins to write a recording that was committed. `due`: when it is given up (anyio.current_time)."""
        self._background.start(f"copy in {directory}", partial(self._keep, recording, directory, readers, due))

    async def leave_newest(self, newer_than: int, place: Path) -> Path | None:
        """Moves the newest copy to `place`, where it outlives the job, and removes the others; returns its new path.

        None, and nothing is removed, where no copy holds more than `newer_than` steps of training. A copy in progress
        has `_LAST_WRITE_S`. Raises OSError.
        """
        leave = partial(self._leave_newest, newer_than, place)
        return await anyio.to_thread.run_sync(leave, abandon_on_cancel=True)

    async def aclose(self) -> None:
        """Gives up what is being written, the memory and every copy; ends within `REMOVE_TIMEOUT_S`. Idempotent."""
        self._closed = True
        self._buffer.holder = None
        with anyio.CancelScope(shield=True):
            try:
                with waiting("removal of the copies", f"the disk of {self._directory}", REMOVE_TIMEOUT_S):
                    await anyio.to_thread.run_sync(self._remove, abandon_on_cancel=True)
            except TimeoutError as error:
                _log.warning("copies of the weights stay on disk", directory=str(self._directory), reason=str(error))

    async def _keep(self, recording: Recording, directory: Path, readers: Readers, due: float) -> None:
        complete, reason = False, "newer weights were published before the disk had taken these"
        write = partial(self._write, recording, directory, readers)
        try:
            with waiting("copy of the weights", f"the disk of {directory}", max(0.0, due - anyio.current_time())):
                complete = await anyio.to_thread.run_sync(write, abandon_on_cancel=True, limiter=self._turns)
        except TimeoutError as error:
            self._overdue, reason = True, str(error)
        except OSError as error:
            reason = str(error)
        finally:
            if not complete:
                recording.give_up()
            readers.copy_written(directory, complete)
        if not (complete or self._closed):
            _warn(directory, reason)

    # in a thread

    def _write(self, recording: Recording, directory: Path, readers: Readers) -> bool:
        """Writes the copy and gives it its name; False where it was given up meanwhile. Raises OSError."""
        with self._disk:
            if not recording.held:
                return False
            self._look()
            if self._needs_room:
                size_bytes = len(header(recording)) + recording.payload.size_bytes
                self._make_room(size_bytes, anyio.from_thread.run_sync(readers.copies_in_use))
            if not write_file(recording, self._unfinished):
                return False
            in_use = anyio.from_thread.run_sync(readers.copies_in_use)  # a disk may have taken minutes
            shutil.rmtree(directory, ignore_errors=True)
            self._unfinished.rename(directory)
            self._complete = [*(path for path in self._complete if path != directory), directory]
            spare = [path for path in self._complete[:-1] if path not in in_use]
            for path in spare[: max(0, len(self._complete) - KEPT)]:
                self._reuse(path)
            return True

    def _look(self) -> None:
        """Takes over what an earlier attempt of the job left."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if not self._looked:
            found = [path for path in self._directory.iterdir() if path != self._unfinished and path.is_dir()]
            self._complete = sorted(found, key=lambda path: path.stat().st_mtime)
            self._looked = True

    def _leave_newest(self, newer_than: int, place: Path) -> Path | None:
        if not self._disk.acquire(timeout=_LAST_WRITE_S):
            self._buffer.holder = None  # the writing thread stops after its block
            if not self._disk.acquire(timeout=_LAST_WRITE_S):
                raise TimeoutError(f"the disk of {self._directory} does not answer")
        try:
            self._look()
            found = [path for path in self._complete if path.is_dir() and steps_of(path.name) > newer_than]
            if not found:
                return None
            self._complete = []
            return leave_behind(found[-1], found[-1].name, place)
        finally:
            self._disk.release()

    def _make_room(self, size_bytes: int, in_use: Collection[Path]) -> None:
        """Takes the files of old copies where there is no other room; raises OSError where that does not help."""
        file = self._unfinished / FILE
        while (lacking := size_bytes - (file.stat().st_size if file.exists() else 0)) > 0:
            free, needed = shutil.disk_usage(self._directory).free, lacking + size_bytes
            if free >= needed:
                return
            spare = [path for path in self._complete if path not in in_use]
            if not spare:
                raise OSError(
                    f"{size(free)} are free, and {size(needed)} would have to be: the copy, and as much "
                    "again for others; set weights.directory to a larger disk, or weights.keep_published"
                )
            self._reuse(spare[0])

    def _reuse(self, path: Path) -> None:
        """The files of an old copy become those of the next; they go where the next has some."""
        self._complete.remove(path)
        if self._unfinished.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):  # somebody removed it
                path.rename(self._unfinished)

    def _remove(self) -> None:
        with self._disk:
            self._buffer.release()
            shutil.rmtree(self._directory, ignore_errors=True)


def _warn(directory: Path, reason: str) -> None:
    told = "no copy of the published weights: an engine that is started again waits for the next publication"
    _log.warning(told, directory=str(directory), reason=reason)
