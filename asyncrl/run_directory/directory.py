"""RunDirectory: a directory that this process has taken, with the paths of its files and the count of attempts."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from asyncrl.config.reading.toml import config_toml
from asyncrl.config.root import Config
from asyncrl.errors import RunDirectoryError
from asyncrl.run_directory.claim import claim, in_use, numbered, refuse, state_of, take_lock, unusable
from asyncrl.run_directory.former import erase, let_go, put_back
from asyncrl.run_directory.names import FORMER, MARKER
from asyncrl.run_directory.running import control_socket, holder


@dataclass(frozen=True, slots=True)
class Gang:
    """The torchrun agent that started this process, and how often it has restarted its ranks."""

    agent: str
    """Process id and start time of the agent: the same for all attempts of a job, and for no other job."""
    restarts: int
    """0 in the first attempt."""

    @classmethod
    def detect(cls, environ: Mapping[str, str] = os.environ) -> Gang:
        """Returns this process's gang. Outside torchrun, each process is a gang of its own."""
        under_agent = "TORCHELASTIC_RESTART_COUNT" in environ
        process = psutil.Process(os.getppid() if under_agent else os.getpid())
        return cls(
            agent=f"{process.pid}@{process.create_time():.2f}",
            restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )


class RunDirectory:
    """A run directory that this process holds locked; a context manager that releases the lock."""

    def __init__(self, path: Path, attempt: int, first_attempt: int, lock: int) -> None:
        self.path = path
        """Absolute path of the directory."""
        self.attempt = attempt
        """0 for the first start of the job; each restart of the gang and each resumption adds one."""
        self.first_attempt = first_attempt
        """Attempt in which this gang took the directory; earlier attempts belong to other jobs."""
        self._lock: int | None = lock

    @classmethod
    def open(
        cls, config: Config, sources: Mapping[str, str] | None = None, *, gang: Gang | None = None
    ) -> RunDirectory:
        """Takes the directory that `config.run` asks for, and writes `config.toml` into it.

        `sources` (dotted key → origin) become comments in that file. Raises RunDirectoryError when the directory cannot
        be taken.
        """
        gang = gang or Gang.detect()
        wanted = Path(os.path.abspath(config.run.dir))
        earlier = _first_attempt(wanted, gang) if gang.restarts else None
        path, lock = earlier or claim(wanted, config.run.if_exists)
        attempt = max(gang.restarts, 1 + _number(path, "attempt", -1))
        run = cls(path, attempt, attempt if earlier is None else _number(path, "first_attempt", attempt), lock)
        marker = {"agent": gang.agent, "attempt": attempt, "first_attempt": run.first_attempt, "started": time.time()}
        try:
            _write(path / MARKER, json.dumps(marker) + "\n")
            run.logs.mkdir(exist_ok=True)
            _write(run.config, config_toml(config, sources))
        except OSError as error:
            run.close()
            raise unusable(path, error) from error
        return run

    @classmethod
    def check(cls, config: Config, *, gang: Gang | None = None) -> None:
        """Raises RunDirectoryError where `open` would, and leaves everything as it is."""
        wanted, policy = Path(os.path.abspath(config.run.dir)), config.run.if_exists
        if (gang or Gang.detect()).restarts:
            return
        for path in numbered(wanted):
            state = state_of(path)
            pid = holder(path) if state in ("run", "begun") else None
            if policy != "new" or (state in ("free", "begun") and pid is None):
                break
        refuse(path, state, policy)
        if pid is not None:
            raise in_use(path, f"process {pid}")
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            if missing:  # only an attempt shows whether the system lets us create the topmost missing folder
                missing[-1].mkdir()
                missing[-1].rmdir()
            elif not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise unusable(path, error) from error

    def weight_version(self, step: int) -> str:
        """The version of weights that `step` batches have trained in this attempt: `attempt.step`."""
        return f"{self.attempt}.{step}"

    @property
    def config(self) -> Path:
        """File of the resolved configuration, without secrets."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """File of metrics, one JSON line for each step."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """File of events, one JSON line each."""
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        """Folder of logs, one file for each process."""
        return self.path / "logs"

    @property
    def export(self) -> Path:
        """Folder of the Hugging Face export; it does not exist until the export is complete."""
        return self.path / "export"

    @property
    def summary(self) -> Path:
        """File of the summary, which the end of the run writes."""
        return self.path / "summary.json"

    def set_results_aside(self) -> tuple[Path, ...]:
        """Renames the export, the summary and the curve that an earlier attempt left; returns the new paths.

        For an attempt that begins anew: `export` becomes `export.attempt-0`. Raises RunDirectoryError where it cannot.
        """
        kept = []
        for path in (self.export, self.summary, self.path / "reward_curve.png"):
            aside = path.with_name(f"{path.stem}.attempt-{self.attempt - 1}{path.suffix}")
            if path.exists():
                try:
                    kept.append(path.rename(aside))
                except OSError as error:
                    raise unusable(path, error) from error
        return tuple(kept)

    def let_former_go(self) -> bool:
        """Gives up the run that this one overwrites, if there is one: this one has results of its own.

        Returns whether `erase_former` has something to do. Takes one rename. Raises RunDirectoryError where it fails.
        """
        try:
            return let_go(self.path)
        except OSError as error:
            raise RunDirectoryError(
                f"run.dir: the run that this one overwrites stays in {self.path / FORMER}: {error.strerror}"
            ) from error

    def erase_former(self) -> str:
        """Erases what was let go, here or by an earlier job; returns why some of it is left, else an empty text.

        May take minutes: a run may be large.
        """
        error = erase(self.path)
        told = "a run that was overwritten is not all erased, the next job tries again"
        return "" if error is None else f"{told}: {error}"

    def put_former_back(self) -> Path | None:
        """Puts the run that this one was to overwrite into its place, unless this one has trained a step.

        It writes nothing more after that. Returns the folder of what it wrote; None where nothing is put back. Raises
        RunDirectoryError.
        """
        try:
            return put_back(self.path)
        except OSError as error:
            raise unusable(self.path, error) from error

    @property
    def control(self) -> Path:
        """Socket on which the running job takes commands; see `control/`."""
        return control_socket(self.path)

    def close(self) -> None:
        """Releases the lock; idempotent."""
        if self._lock is not None:
            # Closing alone would leave the lock with a child that was forked in this moment and has not yet executed.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _first_attempt(path: Path, gang: Gang) -> tuple[Path, int] | None:
    """Locks the directory of this gang's earlier attempt; returns None if that attempt did not get so far."""
    for name in numbered(path):
        if not name.exists():
            return None
        if _marker(name).get("agent") == gang.agent:
            return name, take_lock(name)
    return None


def _number(path: Path, name: str, otherwise: int) -> int:
    """Returns field `name` of the marker that the last attempt in the directory wrote, else `otherwise`."""
    number = _marker(path).get(name)
    return number if isinstance(number, int) else otherwise


def _marker(path: Path) -> dict[str, object]:
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return marker if isinstance(marker, dict) else {}


def _write(path: Path, text: str) -> None:
    """Writes the whole file or nothing."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
