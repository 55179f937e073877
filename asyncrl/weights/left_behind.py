"""A copy of published weights that outlives its job, since no export and no checkpoint holds them.

Invariants
- The copy is moved and not written, so a disk that is full cannot lose it. The copies beside it go, which makes room.
- A run keeps one: an older one goes once a newer one lies in its place.
"""

from __future__ import annotations

import shutil
from pathlib import Path

_NAME = "policy-"


def steps_of(version: str) -> int:
    """Steps of training behind a version, `attempt.step`, or behind the copy of one, `attempt.step-2`."""
    return int(version.partition(".")[2].partition("-")[0])


def leave_behind(copy: Path, version: str, place: Path) -> Path:
    """Moves the directory `copy` of weights `version` to `place`, and removes the directory with the other copies.

    Returns where it is. Raises OSError.
    """
    kept = place / f"{_NAME}{version}"
    copy.rename(kept)
    shutil.rmtree(copy.parent, ignore_errors=True)
    for other in place.glob(f"{_NAME}*"):
        if other != kept and steps_of(other.name.removeprefix(_NAME)) <= steps_of(version):
            shutil.rmtree(other, ignore_errors=True)
    return kept
