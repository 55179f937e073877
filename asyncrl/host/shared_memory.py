"""The files that one process tree leaves in /dev/shm: found while it lives, removed when all of it has ended.

A process that a signal ends unlinks nothing, and cannot be asked afterwards which files it had. An engine leaves its
load table and its semaphores, on GPUs more than that.

Invariants
- A file is removed only if it appeared since the tree began and no live process has it mapped. Either a process of the
  tree was seen to map it, or it appeared just as a process of the tree ended and has a name that libraries give to such
  files.
- Nothing in a directory of /dev/shm is touched: models and copies of weights may lie there.
- A mapped file is known by its inode. glibc maps a named semaphore under a temporary name, and gives the file its own
  name only then: by name it would seem to belong to nobody.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from asyncrl.host.proc import descendants, pids

LOOK_S = 0.5
"""Pause between two looks. A look that finds nothing new only lists the directory: 0.2 ms for 400 files."""
SCAN_S = 3.0
"""Longest pause between two scans for the processes of the tree: 6 ms for 100 processes. A new file causes a scan too.
All looks and scans together take 0.5 % of a core (measured)."""
_DIRECTORY = "/dev/shm/"
_NAMES = ("sem.", "psm_", "torch_", "nccl-", "sglang_loads_", "cuda.shm.")
"""Semaphores, multiprocessing.shared_memory, torch, NCCL, SGLang's table of its load, CUDA IPC."""


class SharedFiles:
    """Files of the tree below this process. Create it before the tree's first process."""

    def __init__(self) -> None:
        self._known = _names()
        self._ours: set[str] = set()
        self._unclaimed: frozenset[str] = frozenset()
        """Files that were new at the last look, when no process of the tree had them mapped: the next look decides."""
        self._members: frozenset[int] = frozenset()
        self._scan_due = 0.0

    def look(self, *, ended: bool = False) -> None:
        """Looks for new files. `ended`: a process of the tree has ended, so that its maps cannot be read any more."""
        names = _names()
        new, self._known = names - self._known, names
        candidates = new | self._unclaimed
        if not (candidates or ended or time.monotonic() >= self._scan_due):
            return
        self._scan_due = time.monotonic() + SCAN_S
        members = frozenset(pid for pid, state in descendants(os.getpid()).items() if state != "Z")
        ended = ended or bool(self._members - members)
        self._members = members
        mapped = mapped_by(members) if candidates else frozenset()
        self._ours |= candidates & mapped
        if ended:
            self._ours |= {name for name in candidates if name.startswith(_NAMES)}
        self._unclaimed = new - self._ours

    def remove(self) -> None:
        """Removes the tree's files; call it once no process of the tree is left."""
        self.look(ended=True)
        left = self._ours & _names()
        if left:
            left -= mapped_by(pids())
        for name in left:
            with suppress(OSError):  # it is gone, or belongs to another user
                os.unlink(_DIRECTORY + name)


def mapped_by(processes: Iterable[int]) -> frozenset[str]:
    """Names of the files directly in /dev/shm that one of `processes` has mapped."""
    inodes: set[int] = set()
    for pid in processes:
        with suppress(OSError):  # it ended in between, or belongs to another user
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                if _DIRECTORY in line:
                    inodes.add(int(line.split(maxsplit=5)[4]))
    with suppress(OSError), os.scandir(_DIRECTORY) as entries:
        return frozenset(entry.name for entry in entries if entry.inode() in inodes)
    return frozenset()


def _names() -> frozenset[str]:
    with suppress(OSError):  # there is no /dev/shm
        return frozenset(os.listdir(_DIRECTORY))
    return frozenset()
