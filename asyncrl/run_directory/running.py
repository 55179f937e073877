"""Running jobs, found by their run directory: the driver's process, and the socket on which it takes commands."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from pathlib import Path

from asyncrl.errors import RunDirectoryError
from asyncrl.run_directory.claim import state_of
from asyncrl.run_directory.names import CONTROL, LOCK, MARKER


def holder(path: Path) -> int | None:
    """Returns the process id of the driver on this machine that holds the directory; None if there is none.

    Raises RunDirectoryError when `path` holds no run.
    """
    if not path.is_dir() or state_of(path) not in ("run", "begun"):
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


def running_job(path: Path) -> int:
    """Returns the process id of the driver of the job that runs in the directory, on this machine.

    Raises RunDirectoryError when `path` holds no run, or no job is running there.
    """
    pid = holder(path)
    if pid is None:
        beside = " and ".join(map(str, running_beside(path)))
        raise RunDirectoryError(f"{path}: no job is running there" + (f"; one is in {beside}" if beside else ""))
    return pid


def running_beside(path: Path) -> tuple[Path, ...]:
    """Returns the directories with the same name up to a number (`demo`, `demo-2`) in which a job runs here."""
    base = re.sub(r"-\d+$", "", path.name)
    beside = re.compile(rf"{re.escape(base)}(-\d+)?")
    names = sorted(name for name in path.parent.glob("*") if beside.fullmatch(name.name) and (name / MARKER).is_file())
    return tuple(name for name in names if holder(name) is not None)


def control_socket(path: Path) -> Path:
    """Returns the address of the control socket of the job that runs in directory `path`."""
    return path / CONTROL
