"""What engines leave on disk, and how it goes with them: sockets, temporary files, shared memory.

An engine that is ended by a signal unlinks nothing. Its sockets and temporary files therefore go into the run's own
scratch directory; its load table and semaphores in /dev/shm (on GPUs more than that) are looked up while it lives.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path

import psutil

SHARED_MEMORY = "/dev/shm/"
_LONGEST_SOCKET_PATH = 107
_SOCKET_NAME = "/tmp12345678"


class Scratch:
    """The directory that engines use for temporary files: inside the run directory where the path is short enough.

    Unix sockets are made in it, whose paths have at most 107 characters.
    """

    def __init__(self, run_dir: Path) -> None:
        inside = run_dir.resolve() / "tmp"
        fits = len(str(inside)) + len(_SOCKET_NAME) <= _LONGEST_SOCKET_PATH
        self.path = inside if fits else Path(tempfile.gettempdir()) / f"asyncrl-{secrets.token_hex(4)}"

    def create(self) -> None:
        """Makes it anew: what a killed attempt left there is gone."""
        self.remove()
        self.path.mkdir(mode=0o700, parents=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def mapped_files(pid: int) -> frozenset[Path]:
    """Files in /dev/shm that process `pid` or a descendant has mapped now; empty where it has ended."""
    try:
        process = psutil.Process(pid)
        tree = [process, *process.children(recursive=True)]
    except psutil.Error:
        return frozenset()
    return frozenset(path for member in tree for path in _mapped_by(member.pid))


def _mapped_by(pid: int) -> list[Path]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # it ended in between
        return []
    names = [line[line.index(SHARED_MEMORY) :] for line in lines if SHARED_MEMORY in line]
    return [Path(name) for name in names if not name.endswith("(deleted)")]


def unlink(files: frozenset[Path]) -> None:
    """Removes what is still there. Only for files whose processes have all ended."""
    for path in files:
        path.unlink(missing_ok=True)
