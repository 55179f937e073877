"""The directory with the checkpoints of a run: staging, publication, checks, removal.

    checkpoints/step-000300/    manifest.json   written last: without it there is no checkpoint
                                model/          Hugging Face export of the actor, loads anywhere
                                trainer/ROLE/   shards of the ranks
                                extra/          files of other parts: the ledger, the cursor in the data
                                config.toml     every setting it was written with, without secrets

Invariants
- A checkpoint appears by one rename, after all its bytes are on the disk. Whenever the process ends, the earlier
  checkpoints are still there; one of the same step may have been replaced by a whole new one.
- A directory that is being written, replaced or removed has a name with a leading dot, which no reader takes for a
  checkpoint.
- A directory that is not an intact checkpoint is never removed.
- A checkpoint whose model cannot compute (weights that are not finite, or absurdly large) counts as a damaged one.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from safetensors import SafetensorError, safe_open

from asyncrl.errors import CheckpointError
from asyncrl.training.checkpoints.files import (
    end_replacement,
    read_record,
    replace_directory,
    sync_directory,
    write_bytes,
)
from asyncrl.training.checkpoints.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    SavedLayout,
    SavedTensor,
    decode_manifest,
    encode_manifest,
)
from asyncrl.training.checkpoints.retention import to_remove
from asyncrl.training.checkpoints.shard import MODEL

_NAME = re.compile(r"step-(\d{6,})")
_CONFIG = "config.toml"
_EXTRA = "extra"
_EXTRA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_READERS = 8
"""Threads that check files."""
_LARGEST_WEIGHT = 1e6
"""No model has a weight as large; squares of what it computes with one overflow."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """An intact checkpoint."""

    path: Path
    manifest: Manifest
    extra: Mapping[str, bytes]
    """The files that `TrainGroup.save_checkpoint` was given, by name."""
    config: str | None
    """The configuration that it was written with, as TOML; None where it holds none."""
    other_layout: str = ""
    """The layouts of its ranks and of those that go on from it, in words, where they differ."""

    @property
    def step(self) -> int:
        """Batches trained when it was written, which is the rollout id to go on with."""
        return self.manifest.step


class CheckpointStore:
    """See the module's docstring. Every method blocks on the disk; one caller at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, step: int) -> Path:
        """The directory of the checkpoint of `step`."""
        return self._root / f"step-{step:06d}"

    def newest(self, since: int | None = None) -> SavedCheckpoint | None:
        """The intact checkpoint that was written last; None where there is none.

        Args:
            since: looks only at checkpoints that this attempt of the job and later ones wrote. Damaged ones are no
                error then, since the job was told to begin anew.

        Raises CheckpointError, without `since`, where there are checkpoints and none is intact: to begin anew would
        lose what was trained.
        """
        found, refused = self._survey()
        if since is not None:
            found, refused = [(path, m) for path, m in found if m.attempt >= since], []
        newest = None
        while found and newest is None:
            try:
                newest = read_checkpoint(found.pop()[0])
            except CheckpointError as error:
                refused.append(str(error))
        if newest is None and refused and since is None:
            raise CheckpointError(
                f"no checkpoint in {self._root} is intact: {'; '.join(refused)}. Begin anew with checkpoint.resume = "
                "never, or move them away and name another one"
            )
        for reason in refused:
            _log.warning("a damaged checkpoint is passed over", reason=reason)
        return newest

    def tidy(self) -> None:
        """Ends renames and removals that a killed process left half-done. Before anything is written."""
        for entry in list(self._root.glob(".step-*")):
            if entry.name.endswith(".replaced"):
                end_replacement(self._root / entry.name.split(".")[1], entry)
            else:
                shutil.rmtree(entry, ignore_errors=True)

    def staging(self, step: int, number: int) -> Path:
        """Where the `number`th checkpoint of this process is staged, on the same disk; the caller makes it."""
        return self._root / f".{self.path(step).name}.{number}.partial"

    def discard(self, staging: Path) -> None:
        """Removes a staging directory, if it is there. Never raises."""
        shutil.rmtree(staging, ignore_errors=True)

    def publish(
        self,
        staging: Path,
        files: Mapping[str, FileRecord],
        *,
        step: int,
        attempt: int,
        layout: SavedLayout,
        roles: Mapping[str, dict[str, SavedTensor]],
        extra: Mapping[str, bytes],
        config: str,
    ) -> Path:
        """Completes the files that the ranks have staged, and renames the directory.

        Args:
            files: those of the ranks, by relative path.
            roles: the tensors of each role's model.
            extra: files of other parts of the job, by name.
            config: the configuration as TOML.

        Raises:
            CheckpointError: a file of a rank is missing, for example on a disk that its node does not share.
            OSError: the disk is full or fails; the checkpoint does not exist then.
        """
        for name, record in files.items():
            _check_size(staging / name, name, record, staging)
        records = {**files, _CONFIG: write_bytes(staging / _CONFIG, config.encode())}
        for name, data in extra.items():
            (staging / _EXTRA).mkdir(exist_ok=True)
            records[f"{_EXTRA}/{name}"] = write_bytes(staging / _EXTRA / name, data)
        manifest = Manifest(
            serial=1 + max((m.serial for _, m in self._survey()[0]), default=0),
            step=step,
            attempt=attempt,
            written_at=time.time(),
            layout=layout,
            roles=dict(roles),
            files=records,
        )
        write_bytes(staging / MANIFEST, encode_manifest(manifest))
        for directory, _, _ in os.walk(staging):
            sync_directory(Path(directory))
        sync_directory(self._root.parent)
        target = self.path(step)
        replace_directory(staging, target, aside=self._root / f".{target.name}.replaced")
        return target

    def prune(self, *, keep_last: int, keep_every: int) -> None:
        """Removes the checkpoints that the policy does not keep. Raises OSError."""
        found, _ = self._survey()
        steps = [manifest.step for _, manifest in found]
        for step in to_remove(steps, keep_last=keep_last, keep_every=keep_every):
            doomed = self._root / f".{self.path(step).name}.removed"
            shutil.rmtree(doomed, ignore_errors=True)
            self.path(step).rename(doomed)  # in one step, so that it is never seen in part
            shutil.rmtree(doomed)

    def _survey(self) -> tuple[list[tuple[Path, Manifest]], list[str]]:
        """Readable checkpoints in the order of writing, by their manifests alone; and what is wrong with others."""
        found, damaged = [], []
        for path in sorted(self._root.glob("step-*")):
            if _NAME.fullmatch(path.name):
                try:
                    manifest = read_manifest(path)
                except CheckpointError as error:
                    damaged.append(str(error))
                    continue
                if path == self.path(manifest.step):
                    found.append((path, manifest))
                else:
                    damaged.append(f"{path} holds the checkpoint of step {manifest.step}: it was copied or renamed")
        return sorted(found, key=lambda entry: entry[1].serial), damaged


def check_extra(extra: Mapping[str, bytes]) -> None:
    """Raises ValueError for a name that is no plain file name."""
    for name in extra:
        if not _EXTRA_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for a file of a checkpoint")


def read_checkpoint(path: Path) -> SavedCheckpoint:
    """Reads a checkpoint, and checks all its bytes and the weights of its model.

    Raises CheckpointError, which names the damaged file or the tensor that has diverged.
    """
    manifest = read_manifest(path)
    for name, record in manifest.files.items():
        _check_size(path / name, name, record, path)
    weights = [path / name for name in manifest.files if re.fullmatch(rf"{MODEL}/.*\.safetensors", name)]
    with ThreadPoolExecutor(_READERS) as pool:
        for problem in pool.map(lambda item: _damage(path, *item), manifest.files.items()):
            if problem is not None:
                raise CheckpointError(problem)
        for problem in pool.map(_divergence, weights):
            if problem is not None:
                raise CheckpointError(f"{path} cannot be gone on from: {problem}; its training had diverged")
    extra = {name.removeprefix(f"{_EXTRA}/"): path / name for name in manifest.files if name.startswith(f"{_EXTRA}/")}
    config = (path / _CONFIG).read_text(encoding="utf-8") if _CONFIG in manifest.files else None
    return SavedCheckpoint(path, manifest, {name: file.read_bytes() for name, file in extra.items()}, config)


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of a directory. Raises CheckpointError where there is none that can be read."""
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        missing = f"it has no {MANIFEST}" if path.is_dir() else "there is no such directory"
        raise CheckpointError(f"{path} is no complete checkpoint: {missing}") from None
    except OSError as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error.strerror}") from error
    return decode_manifest(text, path / MANIFEST)


def resume_from(root: Path, resume: Path | str, *, first_attempt: int = 0) -> SavedCheckpoint | None:
    """The checkpoint that a job begins from, as `checkpoint.resume` asks for; None begins from the model.

    A run that has checkpoints of its own goes on from these, also where a path is given: the path is only where the run
    once began. A gang that was told `never` and is restarted goes on from the checkpoints that it wrote itself, since
    its `first_attempt`.

    Raises CheckpointError: the checkpoint is damaged.
    """
    store = CheckpointStore(root)
    store.tidy()
    found = store.newest(first_attempt if resume == "never" else None)
    if found is None and isinstance(resume, Path):
        found = read_checkpoint(resume)
    return found


def _check_size(file: Path, name: str, record: FileRecord, path: Path) -> None:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} is damaged: {name}: {error.strerror}") from error
    if size != record.size_bytes:
        raise CheckpointError(f"{path} is damaged: {name} has {size} bytes, not {record.size_bytes}")


def _damage(path: Path, name: str, record: FileRecord) -> str | None:
    try:
        same = read_record(path / name) == record
    except OSError as error:
        return f"{path} cannot be read: {name}: {error.strerror}"
    return None if same else f"{path} is damaged: the contents of {name} are not what was written (checksum)"


def _divergence(file: Path) -> str | None:
    """The first tensor that no model can compute with; None where all are fit."""
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_tensor(name)
                largest = float(torch.stack(torch.aminmax(tensor)).abs().max()) if tensor.numel() else 0.0
                if not largest <= _LARGEST_WEIGHT:  # NaN too
                    return f"a weight in {name} is {largest:.3g}"
    except (OSError, SafetensorError) as error:
        return f"{file} cannot be read: {error}"
    return None
