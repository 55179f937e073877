"""The run that a new one overwrites is set aside until the new one has trained a step, so that a typo loses nothing.

    run/                 the former run          run/                 the new run
      metrics.jsonl export/ ...           ->       metrics.jsonl logs/ ...
                                                   .former/           the former run

A new run that ends before its first step gives the directory back: the former run lies in its place again, and what the
new one wrote in `failed-start`. All moves are renames. Where one was cut short, `put_back` completes it.

Invariants
- What `.former` holds is the whole former run. Of a run in `.former.moving`, the rest lies in its place, and no other.
- The files of the new run alone say whether it has trained a step, so a kill at any moment changes nothing.
- What is let go lies under a name of its own. So a file that cannot be erased is in the way of nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from asyncrl.run_directory.names import ERASED, FAILED, FORMER, LOCK, MOVING

_OF_THE_DIRECTORY = frozenset({LOCK, FORMER, MOVING})
_OF_A_STEP = b'"time/step_s"'
"""Key in metrics.jsonl that the line of every trained step has, and no line of an evaluation."""


def set_aside(path: Path) -> None:
    """Moves the run in the directory aside. Raises OSError."""
    moving = path / MOVING
    moving.mkdir()
    for name in _names(path):
        (path / name).rename(moving / name)
    moving.rename(path / FORMER)


def put_back(path: Path) -> Path | None:
    """Moves a run that is set aside into its place; returns the folder of what lay there meanwhile.

    None where no run is set aside, or nothing was there. Where the run there has trained a step, it stays, and the one
    that is set aside is let go. Raises OSError.
    """
    if (path / FORMER).exists() and has_trained(path):
        let_go(path)
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


def has_trained(path: Path) -> bool:
    """True where the run that lies in its place left a checkpoint, an export or the metrics of a step.

    Metrics of an evaluation do not count: one may come before the first step. Raises OSError.
    """
    if (path / "export").exists() or any((path / "checkpoints").glob("step-*")):
        return True
    try:
        with open(path / "metrics.jsonl", "rb") as metrics:
            return any(_OF_A_STEP in line for line in metrics)
    except FileNotFoundError:
        return False


def let_go(path: Path) -> bool:
    """From now on a run that is set aside is not put back; returns whether there is something to erase.

    Raises OSError.
    """
    if (path / FORMER).exists():  # a rename, since half of a run is nothing that could be put back
        (path / FORMER).rename(tempfile.mkdtemp(prefix=f"{ERASED}-", dir=path))
    return any(path.glob(f"{ERASED}*"))


def erase(path: Path) -> BaseException | None:
    """Erases what was let go, now or by an earlier job. A file that resists stays; returns the first such error."""
    errors: list[BaseException] = []
    try:
        for folder in list(path.glob(f"{ERASED}*")):
            shutil.rmtree(folder, onerror=lambda _call, _path, raised: errors.append(raised[1]))
    except OSError as error:  # of the directory itself
        errors.append(error)
    return next((error for error in errors if not isinstance(error, FileNotFoundError)), None)


def _names(path: Path) -> list[str]:
    names = (entry.name for entry in path.iterdir())
    return [name for name in names if name not in _OF_THE_DIRECTORY and not name.startswith(ERASED)]
