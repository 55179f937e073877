"""Saves checkpoints beside the training: the loop waits for a copy in host memory, not for the disk.

Each rank copies its state, on a command like any other. A thread of each rank then writes the copy into one staged
directory and reports over the rank link. When all ranks have reported, rank 0 completes the directory and renames it.

Invariants
- One checkpoint is written at a time, so memory never holds more than one copy. A checkpoint that comes due meanwhile
  is skipped, with a warning: a slow disk costs checkpoints, not steps.
- A disk that is full, slow or gone costs the checkpoint, with a warning and an event, and nothing else. A writer that
  hangs is named after `checkpoint.timeout_s`; its checkpoint is completed when it comes back.
- Older checkpoints are removed only after a newer one is complete.
- A checkpoint in progress at the end of the job gets a few seconds more (`SHUTDOWN_TIMEOUT_S` of ranks.py). It gets
  none where the trainer itself failed, since its ranks may never report. At `close` it is given up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import structlog

from asyncrl.config import Config
from asyncrl.config.reading.toml import config_toml
from asyncrl.errors import CheckpointError
from asyncrl.observability.events import CheckpointWritten, EventLog, FaultSeen
from asyncrl.observability.waits import waiting
from asyncrl.tasks import Background
from asyncrl.training.checkpoints.manifest import FileRecord, SavedLayout, SavedTensor, Wrote, check_roles
from asyncrl.training.checkpoints.settings import changed_settings
from asyncrl.training.checkpoints.store import CheckpointStore, SavedCheckpoint, check_extra, resume_from
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.training.ranks.trainer_thread import ThreadCall, TrainerThread

T = TypeVar("T")

_ROOM_TIMEOUT_S = 30.0
"""The loop waits at most so long until the disk has made a directory."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that is complete."""

    step: int
    seconds: float
    """From the copy to the rename."""


@dataclass(slots=True)
class _Writing:
    """A checkpoint in progress, from its copy to its rename."""

    number: int
    step: int
    staging: Path
    began: float
    missing: set[int]
    files: dict[str, FileRecord] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    reported: anyio.Event = field(default_factory=anyio.Event)
    ended: anyio.Event = field(default_factory=anyio.Event)
    path: Path | None = None


class CheckpointSaver:
    """Rank 0's part. It lives in the event loop."""

    def __init__(
        self,
        config: Config,
        layout: RankLayout,
        *,
        events: EventLog,
        background: Background,
        first_attempt: int | None = None,
    ) -> None:
        """Args:
        background: the tasks of the job, among which checkpoints are completed.
        first_attempt: the first attempt of the job's gang; None where the gang was not restarted.
        """
        self._config = config
        self._settings = config.checkpoint
        self._root = config.run.dir / "checkpoints"
        self._layout = SavedLayout(layout.world_size, layout.tensor_parallel)
        self._events = events
        self._first_attempt = first_attempt
        self._background = background
        self._loop = asyncio.get_running_loop()
        self._store = CheckpointStore(self._root)
        self._completion = anyio.CancelScope()
        self._disk: TrainerThread | None = None
        self._number = 0
        self._writing: _Writing | None = None
        self.newest: Written | None = None
        """The newest checkpoint that this process has completed."""

    @property
    def saving(self) -> int | None:
        """Step of the checkpoint in progress; None where there is none."""
        return None if self._writing is None else self._writing.step

    async def resume(self, roles: Collection[str]) -> SavedCheckpoint | None:
        """Finds the checkpoint to begin from, and logs which settings of training differ from it.

        Raises CheckpointError as `resume_from` does, and where the checkpoint has not exactly these roles.
        """
        where = self._settings.resume
        began = self._events.attempt if self._first_attempt is None else self._first_attempt
        try:
            found = await self._on_disk(
                "checkpoints",
                lambda: resume_from(self._root, where, first_attempt=began),
                self._settings.timeout_s,
            )
        except TimeoutError as error:
            raise CheckpointError(
                f"{self._root}: {error}; the disk hangs, or checkpoint.timeout_s is too short"
            ) from None
        if found is None:
            return None
        check_roles(found.manifest, roles, found.path)
        if found.config is not None and (changed := changed_settings(found.config, self._config)):
            _log.warning("training goes on under other settings than those of its checkpoint", changed=changed)
        if found.manifest.layout == self._layout:
            return found
        return replace(found, other_layout=f"written by {found.manifest.layout}, read by {self._layout}")

    async def save(
        self,
        step: int,
        copy: Callable[[int, Path], Awaitable[object]],
        *,
        roles: Mapping[str, dict[str, SavedTensor]],
        extra: Mapping[str, bytes],
        wait: bool,
    ) -> Path | None:
        """Has every rank copy its state and begins to write; see `TrainGroup.save_checkpoint`.

        Args:
            copy: called with the checkpoint's number and its staging directory; returns when every rank has its copy.
            roles: the tensors of each role's model.
        """
        check_extra(extra)
        if wait:
            await self.finish()
        if self._writing is not None:
            self._fault(f"no checkpoint of step {step}: that of step {self._writing.step} is still being written")
            return None
        self._number += 1
        number, staging = self._number, self._store.staging(step, self._number)
        writing = _Writing(number, step, staging, time.monotonic(), set(range(self._layout.ranks)))
        self._writing = writing
        try:
            room_s = min(_ROOM_TIMEOUT_S, self._settings.timeout_s)
            await self._on_disk("room for the checkpoint", lambda: staging.mkdir(parents=True), room_s)
        except BaseException as error:
            self._writing = None
            writing.ended.set()
            # The disk may be at work on it, and make it yet.
            self._thread().submit(lambda: self._store.discard(staging), what="removal of an unused directory")
            failed = isinstance(error, OSError)  # TimeoutError is one
            self._fault(f"no checkpoint of step {step}: {error if failed else 'it was given up'}")
            if failed:
                return None
            raise
        self._background.start(f"checkpoint of step {step}", partial(self._complete, writing, dict(roles), dict(extra)))
        try:
            await copy(number, staging)
        except BaseException:  # a rank failed, or the caller gave up: there may be ranks that never report
            writing.problems.append("its copy was given up")
            writing.reported.set()
            raise
        if wait:
            await self.finish()
            return writing.path
        return self._store.path(step)

    async def finish(self) -> None:
        """Waits for the checkpoint in progress, `checkpoint.timeout_s` at most."""
        writing = self._writing
        if writing is not None:
            with suppress(TimeoutError), waiting("the checkpoint", "disk", self._settings.timeout_s):
                await writing.ended.wait()

    def wrote(self, rank: int, message: Wrote) -> None:
        """Takes the report of a rank."""
        writing = self._writing
        if writing is None or writing.number != message.number:
            return
        writing.missing.discard(rank)
        writing.files.update(message.files)
        if message.problem:
            writing.problems.append(message.problem)
        if not writing.missing:
            writing.reported.set()

    def report(self, message: Wrote) -> None:
        """Takes the report of rank 0 itself, from its writing thread."""
        with suppress(RuntimeError):  # the loop was closed meanwhile: nobody is left to be told
            self._loop.call_soon_threadsafe(self.wrote, 0, message)

    def close(self) -> None:
        """Gives up the checkpoint in progress, and ends the disk thread without waiting for it."""
        self._completion.cancel()
        if self._disk is not None:
            self._disk.close()

    async def _complete(
        self, writing: _Writing, roles: dict[str, dict[str, SavedTensor]], extra: dict[str, bytes]
    ) -> None:
        try:
            with anyio.CancelScope(shield=True) as self._completion:
                await self._patiently(writing, writing.reported.wait)
                publication = self._thread().submit(lambda: self._publish(writing, roles, extra), what="publication")
                await self._patiently(writing, publication.wait)
                self._conclude(writing, publication)
                if writing.path is not None:
                    removal = self._thread().submit(self._prune, what="removal of old checkpoints")
                    await self._patiently(writing, removal.wait)
                    removal.result()
        finally:
            self._writing = None
            writing.ended.set()

    async def _patiently(self, writing: _Writing, wait: Callable[[], Awaitable[None]]) -> None:
        """Waits without a limit, and warns each time that `checkpoint.timeout_s` has passed."""
        timeout_s = self._settings.timeout_s
        while True:
            try:
                with waiting(f"the checkpoint of step {writing.step}", "disk", timeout_s):
                    return await wait()
            except TimeoutError:
                whom = ", ".join(f"rank {rank}" for rank in sorted(writing.missing)) or "rank 0"
                self._fault(f"{whom} still writes the checkpoint of step {writing.step} after {timeout_s:g} s")

    def _publish(self, writing: _Writing, roles: dict[str, dict[str, SavedTensor]], extra: dict[str, bytes]) -> Path:
        """Completes the directory. In the disk thread."""
        try:
            if writing.problems:
                raise CheckpointError("; ".join(writing.problems))
            return self._store.publish(
                writing.staging,
                writing.files,
                step=writing.step,
                attempt=self._events.attempt,
                layout=self._layout,
                roles=roles,
                extra=extra,
                config=config_toml(self._config),
            )
        finally:
            self._store.discard(writing.staging)

    def _conclude(self, writing: _Writing, job: ThreadCall[Path]) -> None:
        try:
            writing.path = job.result()
        except (OSError, CheckpointError) as error:
            self._fault(f"the checkpoint of step {writing.step} was not written: {error}")
            return
        seconds = time.monotonic() - writing.began
        self.newest = Written(writing.step, seconds)
        self._events.emit(CheckpointWritten(step=writing.step, path=str(writing.path), seconds=seconds))

    def _prune(self) -> None:
        """Removes old checkpoints. In the disk thread."""
        try:
            self._store.prune(keep_last=self._settings.keep_last, keep_every=self._settings.keep_every)
        except OSError as error:
            self._loop.call_soon_threadsafe(self._fault, f"old checkpoints were not removed: {error}")

    def _fault(self, what: str) -> None:
        _log.warning(what)
        self._events.emit(FaultSeen(component="checkpoint", what=what))

    def _thread(self) -> TrainerThread:
        if self._disk is None:
            self._disk = TrainerThread("checkpoints")
        return self._disk

    async def _on_disk(self, what: str, call: Callable[[], T], timeout_s: float) -> T:
        return await self._thread().call(call, what=what, timeout_s=timeout_s)
