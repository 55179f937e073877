"""Claims of a run directory: what a folder holds, whether a job may take it, and the lock that takes it."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from asyncrl.errors import RunDirectoryError
from asyncrl.run_directory.former import put_back, set_aside
from asyncrl.run_directory.names import CONTROL, ERASED, FORMER, LOCK, MARKER, MOVING

IfExists = Literal["error", "new", "overwrite", "resume"]
"""What `run.if_exists` may say about a directory that holds a run."""
State = Literal["free", "begun", "run", "foreign"]
"""What a folder holds. `free`: nothing. `begun`: a run without results so far. `run`: a run with results (metrics of a
step or an evaluation, an export). `foreign`: files of others."""

_BEFORE_THE_FIRST_STEP = frozenset(
    {
        *(MARKER, LOCK, CONTROL, "config.toml", "events.jsonl", "metrics.jsonl", "logs", "weights"),
        *("samples.jsonl", "samples.1.jsonl", "trackers"),
    }
)
"""What the directory of a `begun` run may hold; its metrics.jsonl is empty."""


class _InUseError(RunDirectoryError):
    """Another process holds the lock."""


def claim(path: Path, policy: IfExists) -> tuple[Path, int]:
    """Takes a directory for a new job; returns its path and the descriptor that holds its lock.

    The directory then holds nothing of an earlier run, except of one that is resumed, or that is overwritten and thus
    set aside. With policy `new` it may be another one than `path`. Raises RunDirectoryError when the directory cannot
    be taken.
    """
    if policy == "new":
        return next((name, lock) for name in numbered(path) if (lock := _lock_if_free(name)) is not None)
    refuse(path, state_of(path), policy)
    lock = take_lock(path)
    try:
        put_back(path)  # a run that was killed did not
        state = state_of(path)
        refuse(path, state, policy)
        if state == "begun":
            _erase(path)
        elif state == "run" and policy == "overwrite":
            set_aside(path)
    except OSError as error:
        os.close(lock)
        raise unusable(path, error) from error
    except BaseException:  # whatever ends the claim, the lock must be released
        os.close(lock)
        raise
    return path, lock


def refuse(path: Path, state: State, policy: IfExists) -> None:
    """Raises RunDirectoryError if a directory in `state` may not be taken under `policy`."""
    if state == "foreign":
        raise RunDirectoryError(
            f"run.dir: {path} holds files that are not of a run, so they are left alone; choose another directory "
            "with --run.dir"
        )
    if state == "run" and policy == "error":
        raise RunDirectoryError(
            f"run.dir: {path} already holds a run; keep it and take the next free name with --run.if-exists new, "
            "continue it with resume, erase it with overwrite, or choose another directory with --run.dir"
        )


def numbered(path: Path) -> Iterator[Path]:
    """Yields runs/a, runs/a-2, runs/a-3, ... without end. Raises RunDirectoryError for a path without a name."""
    yield path
    if not path.name:
        raise RunDirectoryError(f"run.dir: there is no other name for {path}; choose another with --run.dir")
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}-{number}")


def state_of(path: Path) -> State:
    """Returns what the folder at `path` holds; raises RunDirectoryError if it cannot be read."""
    try:
        names = {entry.name for entry in path.iterdir() if not entry.name.startswith(ERASED)}
        if names & {FORMER, MOVING}:
            return "run"
        if MARKER not in names:
            return "foreign" if names - {LOCK} else "free"
        metrics = path / "metrics.jsonl"
        has_results = not names <= _BEFORE_THE_FIRST_STEP or (metrics.exists() and metrics.stat().st_size > 0)
    except FileNotFoundError:
        return "free"
    except OSError as error:
        raise unusable(path, error) from error
    return "run" if has_results else "begun"


def take_lock(path: Path) -> int:
    """Creates the directory and takes its lock; returns the descriptor that holds it, which children do not inherit.

    Raises RunDirectoryError when another process holds the lock or the directory cannot be used.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unusable(path, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
        os.close(lock)
        raise in_use(path, holder) from error
    except OSError as error:
        os.close(lock)
        raise unusable(path, error) from error
    return lock


def in_use(path: Path, holder: str) -> RunDirectoryError:
    """Returns the error for a directory whose lock `holder` (`process 7 on host`) has."""
    return _InUseError(f"run.dir: {path} is in use by {holder}; wait for it to end, or choose another with --run.dir")


def unusable(path: Path, error: OSError) -> RunDirectoryError:
    """Returns the error for a directory that the system does not let us use."""
    return RunDirectoryError(f"run.dir: cannot use {path}: {error.strerror}; choose another with --run.dir")


def _lock_if_free(path: Path) -> int | None:
    """Takes the lock of a directory without results and empties it; returns None if it has results or is in use."""
    if state_of(path) not in ("free", "begun"):
        return None
    try:
        lock = take_lock(path)
    except _InUseError:
        return None
    if state_of(path) not in ("free", "begun"):
        os.close(lock)
        return None
    if state_of(path) == "begun":
        _erase(path)
    return lock


def _erase(path: Path) -> None:
    """Empties the directory of a run. The marker goes last, so that an interrupted erasure can be repeated."""
    try:
        for entry in path.iterdir():
            if entry.name in (MARKER, LOCK) or entry.name.startswith(ERASED):  # the last is erased beside the training
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        (path / MARKER).unlink()
    except OSError as error:
        raise unusable(path, error) from error
