"""What one check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    check: str
    """What was checked, in one or two words."""
    level: Level
    seen: str
    """What was found, with figures."""
    mend: str = ""
    """What to do about it; empty where all is well."""


def ok(check: str, seen: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", seen)


def warning(check: str, seen: str, mend: str) -> Finding:
    """Some jobs will not run, or run badly."""
    return Finding(check, "warning", seen, mend)


def failed(check: str, seen: str, mend: str) -> Finding:
    """No job will run, or not the one that was asked for."""
    return Finding(check, "failed", seen, mend)
