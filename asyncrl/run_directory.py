"""The directory that holds everything a run leaves behind: config, metrics, events, logs, export, summary.

Invariants
- One process at a time: the lock is the kernel's, so it ends with the process that holds it, however that ends.
- A directory is taken only when it is new, empty, or holds a run of ours (`.asyncrl-run.json`) that the user agreed to
  overwrite or resume, or that left nothing but logs; nothing else is ever erased or written into.
- A gang that torchrun restarted goes on in the directory of its first attempt, whatever `run.if_exists` says.
- The saved configuration carries no secrets.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import psutil

from asyncrl.config.reading.toml import config_toml
from asyncrl.config.root import Config
from asyncrl.errors import RunDirectoryError

MARKER = ".asyncrl-run.json"
LOCK = ".lock"

IfExists = Literal["error", "new", "overwrite", "resume"]
State = Literal["free", "begun", "run", "foreign"]
"""A run has begun until there is something to keep of it: the figures of a step or of an evaluation, an export."""

_BEFORE_THE_FIRST_STEP = frozenset({MARKER, LOCK, "config.toml", "events.jsonl", "metrics.jsonl", "logs", "weights"})
"""What is in the directory of a run before anything came of it; metrics.jsonl is still empty then."""


@dataclass(frozen=True, slots=True)
class Gang:
    """The torchrun agent that started this process, and how often it has restarted its ranks."""

    agent: str
    """Process id and start time of the agent: the same for all attempts of a job, and for no other job."""
    restarts: int

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> Gang:
        """This process's gang; outside torchrun each process is its own."""
        under_agent = "TORCHELASTIC_RESTART_COUNT" in environ
        process = psutil.Process(os.getppid() if under_agent else os.getpid())
        return cls(
            agent=f"{process.pid}@{process.create_time():.2f}",
            restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )


class _InUseError(RunDirectoryError):
    """Another process holds the lock."""


class RunDirectory:
    """A locked run directory; a context manager that gives the lock back."""

    def __init__(self, path: Path, attempt: int, first_attempt: int, lock: int) -> None:
        self.path = path
        self.attempt = attempt
        """0 for the first start of the job, then one more for each restart of the gang, and for each resumption."""
        self.first_attempt = first_attempt
        """The one with which this gang took the directory; earlier ones were of other jobs."""
        self._lock: int | None = lock

    @classmethod
    def open(
        cls, config: Config, sources: Mapping[str, str] | None = None, *, gang: Gang | None = None
    ) -> RunDirectory:
        """Takes the directory that `config.run` asks for and writes `config.toml` into it.

        `sources` (dotted key → origin) are added to the saved file as comments. Raises RunDirectoryError.
        """
        gang = gang or Gang.detect()
        wanted = Path(os.path.abspath(config.run.dir))
        earlier = _first_attempt(wanted, gang) if gang.restarts else None
        path, lock = earlier or _claim(wanted, config.run.if_exists)
        attempt = max(gang.restarts, 1 + _number(path, "attempt", -1))
        run = cls(path, attempt, attempt if earlier is None else _number(path, "first_attempt", attempt), lock)
        marker = {"agent": gang.agent, "attempt": attempt, "first_attempt": run.first_attempt, "started": time.time()}
        try:
            _write(path / MARKER, json.dumps(marker) + "\n")
            run.logs.mkdir(exist_ok=True)
            _write(run.config, config_toml(config, sources))
        except OSError as error:
            run.close()
            raise _unusable(path, error) from error
        return run

    @classmethod
    def check(cls, config: Config, *, gang: Gang | None = None) -> None:
        """Raises RunDirectoryError for what `open` would refuse, and leaves everything as it is."""
        wanted, policy = Path(os.path.abspath(config.run.dir)), config.run.if_exists
        if (gang or Gang.detect()).restarts:
            return
        for path in _names(wanted):
            state = _state(path)
            pid = holder(path) if state in ("run", "begun") else None
            if policy != "new" or (state in ("free", "begun") and pid is None):
                break
        _refuse(path, state, policy)
        if pid is not None:
            raise _in_use(path, f"process {pid}")
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            if missing:  # only the system can say whether it may be made: as far as that goes, it is tried
                missing[-1].mkdir()
                missing[-1].rmdir()
            elif not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise _unusable(path, error) from error

    def weight_version(self, step: int) -> str:
        """The version of weights that `step` batches have trained in this attempt: `attempt.step`."""
        return f"{self.attempt}.{step}"

    @property
    def config(self) -> Path:
        """The resolved configuration, without secrets."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        """Directory of the logs, one file for each process."""
        return self.path / "logs"

    @property
    def export(self) -> Path:
        """Directory of the Hugging Face export; does not exist until the export is complete."""
        return self.path / "export"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def close(self) -> None:
        """Gives the lock back; idempotent."""
        if self._lock is not None:
            # Closing alone would leave it with a child that was forked in this moment and has not yet executed.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def holder(path: Path) -> int | None:
    """Process id of the driver that holds the directory, on this machine; None where nobody does.

    Raises RunDirectoryError when `path` holds no run.
    """
    if not path.is_dir() or _state(path) not in ("run", "begun"):
        raise RunDirectoryError(f"{path} is not the directory of a run (it holds no {MARKER})")
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        name = os.pread(lock, 200, 0).decode(errors="replace").split()
        return int(name[1]) if len(name) == 4 and name[3] == socket.gethostname() else None
    finally:
        os.close(lock)
    return None


def running_beside(path: Path) -> tuple[Path, ...]:
    """Directories of the same name but for their number (`demo`, `demo-2`) in which a job of this machine runs."""
    base = re.sub(r"-\d+$", "", path.name)
    beside = re.compile(rf"{re.escape(base)}(-\d+)?")
    names = sorted(name for name in path.parent.glob("*") if beside.fullmatch(name.name) and (name / MARKER).is_file())
    return tuple(name for name in names if holder(name) is not None)


def _claim(path: Path, policy: IfExists) -> tuple[Path, int]:
    """The directory to use, locked, with nothing of an earlier run in it but of one that is resumed."""
    if policy == "new":
        return next((name, lock) for name in _names(path) if (lock := _lock_if_free(name)) is not None)
    _refuse(path, _state(path), policy)
    lock = _lock(path)
    try:
        state = _state(path)
        _refuse(path, state, policy)
        if state == "begun" or (state == "run" and policy != "resume"):
            _erase(path)
    except BaseException:  # whatever ended the claim, the lock goes back
        os.close(lock)
        raise
    return path, lock


def _refuse(path: Path, state: State, policy: IfExists) -> None:
    """Raises RunDirectoryError where a directory in `state` is not to be taken."""
    if state == "foreign":
        raise RunDirectoryError(
            f"run.dir: {path} holds files that are no run's, and they are left alone; choose another with --run.dir"
        )
    if state == "run" and policy == "error":
        raise RunDirectoryError(
            f"run.dir: {path} already holds a run; keep it and take the next free name with --run.if-exists "
            "new, go on with it with resume, erase it with overwrite, or choose another with --run.dir"
        )


def _first_attempt(path: Path, gang: Gang) -> tuple[Path, int] | None:
    """The directory of this gang's earlier attempt, locked; None where it had not got that far."""
    for name in _names(path):
        if not name.exists():
            return None
        if _agent_of(name) == gang.agent:
            return name, _lock(name)
    return None


def _names(path: Path) -> Iterator[Path]:
    """runs/a, runs/a-2, runs/a-3, ... without end."""
    yield path
    if not path.name:
        raise RunDirectoryError(f"run.dir: there is no other name for {path}; choose another with --run.dir")
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}-{number}")


def _state(path: Path) -> State:
    try:
        names = {entry.name for entry in path.iterdir()}
        if MARKER not in names:
            return "foreign" if names - {LOCK} else "free"
        metrics = path / "metrics.jsonl"
        came_to_nothing = names <= _BEFORE_THE_FIRST_STEP and not (metrics.exists() and metrics.stat().st_size)
    except FileNotFoundError:
        return "free"
    except OSError as error:
        raise _unusable(path, error) from error
    return "begun" if came_to_nothing else "run"


def _agent_of(path: Path) -> str | None:
    agent = _marker(path).get("agent")
    return agent if isinstance(agent, str) else None


def _number(path: Path, name: str, otherwise: int) -> int:
    """What the marker of the attempt that had the directory last says under `name`."""
    number = _marker(path).get(name)
    return number if isinstance(number, int) else otherwise


def _marker(path: Path) -> dict[str, object]:
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return marker if isinstance(marker, dict) else {}


def _lock_if_free(path: Path) -> int | None:
    """The lock of a directory without a run to keep, emptied; None where another process has or takes it."""
    if _state(path) not in ("free", "begun"):
        return None
    try:
        lock = _lock(path)
    except _InUseError:
        return None
    if _state(path) not in ("free", "begun"):
        os.close(lock)
        return None
    if _state(path) == "begun":
        _erase(path)
    return lock


def _lock(path: Path) -> int:
    """Creates the directory and takes its lock; the descriptor holds it and is not inherited."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except BlockingIOError as error:
        whom = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
        os.close(lock)
        raise _in_use(path, whom) from error
    except OSError as error:
        os.close(lock)
        raise _unusable(path, error) from error
    return lock


def _erase(path: Path) -> None:
    """Empties the directory of a run; the marker goes last, so that an interrupted erasure can be repeated."""
    try:
        for entry in path.iterdir():
            if entry.name in (MARKER, LOCK):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        (path / MARKER).unlink()
    except OSError as error:
        raise _unusable(path, error) from error


def _write(path: Path, text: str) -> None:
    """Writes whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _in_use(path: Path, whom: str) -> _InUseError:
    return _InUseError(f"run.dir: {path} is in use by {whom}; wait for it to end, or choose another with --run.dir")


def _unusable(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(f"run.dir: cannot use {path}: {error.strerror}; choose another with --run.dir")
