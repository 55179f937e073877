"""What a tracker is to us, and what it learns of the run."""

from __future__ import annotations

import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

FOLDER = "trackers"
"""Folder in the run directory where sinks keep their files."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a sink learns of the run when it is made."""

    project: str
    name: str
    identity: str
    """Eight characters: the same for all attempts of a run directory, and for no other run."""
    directory: Path
    """The run directory."""
    attempt: int
    """0 for the first start of the run; over 0 where some of its steps may come again."""
    config: Mapping[str, Any]
    """The resolved configuration without secrets, and `job`: directory, attempt and the router's address."""

    @classmethod
    def read(cls, directory: Path, *, attempt: int, router_url: str | None) -> TrackedRun:
        """Reads the configuration in a run directory. `router_url` is None for a run without engines."""
        config = tomllib.loads((directory / "config.toml").read_text(encoding="utf-8"))
        track = config["track"]
        name = directory.name if track["name"] == "none" else track["name"]
        job = {"directory": str(directory), "attempt": attempt, "router_url": router_url}
        return cls(track["project"], name, identity_of(directory), directory, attempt, {**config, "job": job})

    @property
    def files(self) -> Path:
        """Folder in the run directory where sinks keep their files."""
        return self.directory / FOLDER


class Sink(Protocol):
    """A tracker in use. Made by its class with a `TrackedRun` and the entries of `track.args` for it.

    It may take any time, hang or raise: it has a process of its own, and the job does not wait for it. What it prints
    is in `logs/tracker-NAME.log`.
    """

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Takes one line of metrics.jsonl: the metrics after `step` trained steps, written at `time` (epoch seconds).

        A step has one line for training and one for an evaluation. Values may be NaN or infinite. After a resume,
        steps may come again.
        """

    def finish(self) -> None:
        """The run has ended; there are no further lines."""


def identity_of(directory: Path) -> str:
    """The identity of the run in a run directory, which the first call makes. Raises OSError where it cannot."""
    file = directory / FOLDER / "identity"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(secrets.token_hex(4), encoding="ascii")
    return file.read_text(encoding="ascii")


def end_mark(directory: Path, attempt: int) -> Path:
    """The file by which the driver tells the sinks of an attempt that it writes no further metrics."""
    return directory / FOLDER / f"ended-{attempt}"
