"""The run that a new one overwrites is set aside until the new one has trained a step, so that a typo loses nothing.

    run/                 the former run          run/                 the new run
      metrics.jsonl export/ ...           ->       metrics.jsonl logs/ ...
                                                   .former/           the former run

A new run that ends before its first step gives the directory back: the former run lies in its place again, and what the
new one wrote in `failed-start`. All moves are renames. Where one was cut short, `put_back` completes it.

Invariants
- What `.former` holds is the whole former run. Of a run in `.former.moving`, the rest lies in its place, and no other.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from asyncrl.run_directory.names import ERASED, FAILED, FORMER, LOCK, MOVING

_OF_THE_DIRECTORY = frozenset({LOCK, FORMER, MOVING, ERASED})


def set_aside(path: Path) -> None:
    """Moves the run in the directory aside. Raises OSError."""
    shutil.rmtree(path / ERASED, ignore_errors=True)
    moving = path / MOVING
    moving.mkdir()
    for name in _names(path):
        (path / name).rename(moving / name)
    moving.rename(path / FORMER)


def put_back(path: Path) -> Path | None:
    """Moves a run that is set aside into its place; returns the folder of what lay there meanwhile.

    None where no run is set aside, or nothing was there. Raises OSError.
    """
    former, moving, failed = path / FORMER, path / MOVING, path / FORMER / FAILED
    meanwhile = _names(path) if former.exists() else []
    if meanwhile:
        shutil.rmtree(failed, ignore_errors=True)
        failed.mkdir()
        for name in meanwhile:
            (path / name).rename(failed / name)
    if former.exists():
        former.rename(moving)
    if moving.exists():
        for entry in list(moving.iterdir()):
            entry.rename(path / entry.name)
        moving.rmdir()
    return path / FAILED if meanwhile else None


def erase(path: Path) -> None:
    """Erases a run that is set aside, if there is one; a file that resists is left to the next time. Raises OSError."""
    former, erased = path / FORMER, path / ERASED
    if former.exists():
        shutil.rmtree(erased, ignore_errors=True)
        former.rename(erased)  # half of it is nothing that could be put back
        shutil.rmtree(erased, ignore_errors=True)


def _names(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir() if entry.name not in _OF_THE_DIRECTORY]
