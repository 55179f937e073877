"""The files that an engine's processes keep in shared memory, so that they go when the engine does.

An engine that is ended by a signal unlinks nothing: each leaves its load table and semaphores in /dev/shm, and on
GPUs more than that, until the tmpfs is full.
"""

from __future__ import annotations

from pathlib import Path

import psutil

SHARED_MEMORY = "/dev/shm/"


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
