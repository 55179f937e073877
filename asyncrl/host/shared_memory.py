"""What one process tree leaves in /dev/shm: found while it lives, removed when all of it has ended.

A process that is ended by a signal unlinks nothing, and nobody can ask it afterwards what it had: an engine leaves its
load table and its semaphores, on GPUs more than that.

Invariants
- Removed are only files that appeared since the tree began and that nobody alive has mapped: those that a process of
  the tree was seen to map, and those that appeared just as one of it ended, by names that libraries give such files.
- Nothing in a directory of /dev/shm is touched: models and copies of weights may lie there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from asyncrl.host.proc import descendants, pids

LOOK_S = 0.5
"""Pause between two looks. One that finds nothing new lists the directory, 0.2 ms for 400 files."""
SCAN_S = 3.0
"""Longest pause between two looks at who belongs to the tree, which each new file brings about too: 6 ms for 100
processes. All looks together take 0.5 % of a core (measured)."""
_DIRECTORY = "/dev/shm/"
_NAMES = ("sem.", "psm_", "torch_", "nccl-", "sglang_loads_", "cuda.shm.")
"""Semaphores, multiprocessing.shared_memory, torch, NCCL, SGLang's table of its load, CUDA IPC."""


class SharedFiles:
    """Files of the tree below this process. Made before its first process is."""

    def __init__(self) -> None:
        self._known = _names()
        self._ours: set[str] = set()
        self._unclaimed: frozenset[str] = frozenset()
        """New at the last look, and mapped by nobody of the tree then: they get one more."""
        self._members: frozenset[int] = frozenset()
        self._scan_due = 0.0

    def look(self, *, ended: bool = False) -> None:
        """`ended`: some process of the tree has, of which nobody can see any more what it had mapped."""
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
        """Once nothing of the tree is left."""
        self.look(ended=True)
        left = self._ours & _names()
        if left:
            left -= mapped_by(pids())
        for name in left:
            with suppress(OSError):  # somebody else was quicker, or does not let us
                os.unlink(_DIRECTORY + name)


def mapped_by(processes: Iterable[int]) -> frozenset[str]:
    """Names of the files directly in /dev/shm that one of `processes` has mapped."""
    found: set[str] = set()
    for pid in processes:
        with suppress(OSError):  # it ended in between, or belongs to somebody else
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                name = line.partition(_DIRECTORY)[2]
                if name and "/" not in name and not name.endswith(" (deleted)"):
                    found.add(name)
    return frozenset(found)


def _names() -> frozenset[str]:
    with suppress(OSError):  # there is none
        return frozenset(os.listdir(_DIRECTORY))
    return frozenset()
