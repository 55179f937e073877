"""Sinks of a user's own that do what a tracker should not do."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from asyncrl.observability.trackers.sink import TrackedRun


class Kept:
    """Writes what it is told into a file."""

    def __init__(self, run: TrackedRun, *, file: str) -> None:
        self._file = Path(file)
        self._told: list[object] = [[run.name, run.config["job"], run.config["train"]["lr"]]]

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        self._told.append([step, {name: str(value) for name, value in metrics.items()}])

    def finish(self) -> None:
        self._file.write_text(json.dumps(self._told))


class Hanging:
    """Never returns, and hears no signal but the one that nothing survives."""

    def __init__(self, run: TrackedRun) -> None:
        pass

    def log(self, step: int, time_: float, metrics: Mapping[str, float]) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1e6)

    def finish(self) -> None:
        raise AssertionError("it never gets here")


class Failing:
    """Cannot be made."""

    def __init__(self, run: TrackedRun) -> None:
        raise ValueError("not logged in.")
