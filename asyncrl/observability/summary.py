"""The summary of a run at its end: summary.json, a few lines on the terminal, and the reward curve.

Invariants
- summary.json always holds `accuracy_before`, `accuracy_after`, `seconds`, `steps` and `time_split`.
- It appears whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from asyncrl.errors import RunDirectoryError
from asyncrl.observability.reward_curve import curve_text, write_curve_png
from asyncrl.observability.text_plots import duration, labelled, time_bar, time_legend

SUMMARY_FILE = "summary.json"
CURVE_FILE = "reward_curve.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The results of a run that has finished or was stopped."""

    accuracy_before: float | None
    """Held-out accuracy before training; None if it was not evaluated."""
    accuracy_after: float | None
    """Held-out accuracy of the final policy; None if it was not evaluated."""
    seconds: float
    """Wall time of the job, including start-up."""
    steps: int
    """Steps trained."""
    time_split: Mapping[str, float]
    """Seconds by phase; they add up to `seconds` or a little less."""
    export: str | None = None
    """Hugging Face directory of the final policy; None if it was not exported."""
    rewards: tuple[float, ...] = ()
    """Mean reward of each step."""
    accuracies: tuple[tuple[int, float], ...] = ()
    """Held-out accuracy as (steps trained, value)."""
    outcome: str = "finished"
    """`finished`, or why the run ended early."""
    facts: Mapping[str, str | int | float | None] = field(default_factory=dict)
    """Further results by name, each for one line: `model`, `tokens trained`, `largest log-prob difference`."""

    def record(self) -> dict[str, Any]:
        """Returns the fields by name as plain JSON types; numbers that are not finite become None."""
        record = dataclasses.asdict(self)
        record["rewards"] = [value if math.isfinite(value) else None for value in self.rewards]
        record["facts"] = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in self.facts.items()
        }
        return record


def write_summary(summary: RunSummary, run_dir: Path) -> Path:
    """Writes summary.json and returns its path. Raises RunDirectoryError when the directory cannot be written."""
    path = run_dir / SUMMARY_FILE
    try:
        unfinished = path.with_suffix(".json.tmp")
        unfinished.write_text(json.dumps(summary.record(), indent=2, allow_nan=False) + "\n")
        os.replace(unfinished, path)
    except OSError as error:
        raise RunDirectoryError(
            f"{run_dir}: the summary cannot be written ({error.strerror}); make the directory writable"
        ) from error
    return path


def write_curve(summary: RunSummary, run_dir: Path) -> Path | None:
    """Draws reward_curve.png and returns its path; None if no step was trained. Takes a second or more.

    Raises RunDirectoryError when the directory cannot be written.
    """
    if not summary.rewards:
        return None
    path = run_dir / CURVE_FILE
    try:
        write_curve_png(path, summary.rewards, summary.accuracies, _curve_title(summary))
    except OSError as error:
        raise RunDirectoryError(
            f"{path}: the reward curve cannot be written ({error.strerror}); make the directory writable"
        ) from error
    return path


def _curve_title(summary: RunSummary) -> str:
    model = summary.facts.get("model")
    return f"Reward over {summary.steps} steps" + (f" of {Path(str(model)).name}" if model else "")


def _change(summary: RunSummary) -> str:
    def shown(value: float | None) -> str:
        return "not evaluated" if value is None else f"{value:.3f}"

    return f"{shown(summary.accuracy_before)} → {shown(summary.accuracy_after)}"


def print_summary(summary: RunSummary, stream: TextIO, files: tuple[Path, ...] = ()) -> None:
    """Prints the summary: a table that ends with the paths of `files`, and the reward curve in characters."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    width = min(console.width, 100)
    rows = [
        ("outcome", Text(summary.outcome)),
        *([("accuracy", Text(_change(summary), style="bold"))] if summary.accuracies else []),
        ("steps", Text(f"{summary.steps} in {duration(summary.seconds)}")),
    ]
    if any(summary.time_split.values()):
        rows += [("time", time_bar(summary.time_split, 40)), ("", time_legend(summary.time_split, seconds=True))]
    rows += [(name, Text(f"{v:.4g}" if isinstance(v, float) else str(v))) for name, v in summary.facts.items()]
    if summary.export is not None:
        rows.append(("export", Text(summary.export)))
    rows += [(path.stem.replace("_", " "), Text(str(path))) for path in files]
    console.print()
    for row in labelled(rows):
        console.print(row)
    if curve := curve_text(summary.rewards, width=width):
        console.print()
        console.print(Text(curve))
