"""The summary of a run at its end: summary.json, a few lines on the terminal, and the reward curve.

Invariants
- summary.json always holds `accuracy_before`, `accuracy_after`, `reward_before`, `reward_after`, `seconds`, `steps` and
  `time_split`.
- It is of the whole run: after a resume, the steps before it count too, as far as metrics.jsonl has them.
- It appears whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from asyncrl.errors import RunDirectoryError, counted
from asyncrl.observability.reward_curve import Points, curve_text, write_curve_png
from asyncrl.observability.run_view import HeldOut
from asyncrl.observability.text_plots import duration, figure, labelled, time_bar, time_legend

SUMMARY_FILE = "summary.json"
CURVE_FILE = "reward_curve.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The results of a run that has finished or was stopped."""

    seconds: float
    """Wall time of this attempt, including start-up, and of the steps before a resume."""
    steps: int
    """Steps trained."""
    resumed_at: int | None = None
    """Steps that were trained before this attempt; None if it began at the model."""
    time_split: Mapping[str, float]
    """Seconds by phase; they add up to `seconds` or a little less."""
    export: str | None = None
    """Hugging Face directory of the final policy; None if it was not exported."""
    rewards: tuple[float, ...] = ()
    """Mean reward of each step, NaN where nobody knows it."""
    rewards_from: int = 1
    """Step of the first of `rewards`: over 1 where the steps before a resume are those of another directory."""
    evaluations: tuple[tuple[int, HeldOut], ...] = ()
    """Points of the evaluation as (steps trained, point), in order."""
    outcome: str = "finished"
    """`finished`, or why the run ended early."""
    facts: Mapping[str, str | int | float | None] = field(default_factory=dict)
    """Further results by name, each for one line: `model`, `tokens trained`, `largest log-prob difference`."""

    def record(self) -> dict[str, Any]:
        """Returns the fields by name as plain JSON types; numbers that are not finite become None."""
        record = dataclasses.asdict(self)
        before, after = self.before, self.after
        record["accuracy_before"], record["reward_before"] = before and before.accuracy, before and before.reward
        record["accuracy_after"], record["reward_after"] = after and after.accuracy, after and after.reward
        record["accuracies"] = [(step, point.accuracy) for step, point in self.evaluations]
        record["held_out_rewards"] = [(step, point.reward) for step, point in self.evaluations]
        del record["evaluations"]
        record["rewards"] = [value if math.isfinite(value) else None for value in self.rewards]
        record["facts"] = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in self.facts.items()
        }
        return record

    @property
    def before(self) -> HeldOut | None:
        """The evaluation before training; None if there was none."""
        return self.evaluations[0][1] if self.evaluations else None

    @property
    def after(self) -> HeldOut | None:
        """The last evaluation; None if there was none after the first."""
        return self.evaluations[-1][1] if len(self.evaluations) > 1 else None

    @property
    def tells_rewards(self) -> bool:
        """Whether held-out rewards are not only 0 and 1, so that their mean is more than the accuracy."""
        return any(point.tells_more for _, point in self.evaluations)


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
    what = "held-out reward" if summary.tells_rewards else "held-out accuracy"
    values = [(step, p.reward if summary.tells_rewards else p.accuracy) for step, p in summary.evaluations]
    held_out = Points(what, tuple((step, value) for step, value in values if value is not None))
    try:
        write_curve_png(path, summary.rewards, held_out, first=summary.rewards_from, title=_curve_title(summary))
    except OSError as error:
        raise RunDirectoryError(
            f"{path}: the reward curve cannot be written ({error.strerror}); make the directory writable"
        ) from error
    return path


def _curve_title(summary: RunSummary) -> str:
    model = summary.facts.get("model")
    return f"Reward over {counted(summary.steps, 'step')}" + (f" of {Path(str(model)).name}" if model else "")


def _held_out(summary: RunSummary, value: Callable[[HeldOut], float | None]) -> Text:
    """`0.410 → 0.950`, or the only point, with its step where training went on after it."""
    step, first = summary.evaluations[0]
    points = [first] if summary.after is None else [first, summary.after]
    text = " → ".join("not evaluated" if (v := value(point)) is None else figure(v) for point in points)
    if summary.after is None and step < summary.steps:
        text += f" after step {step}" if step else " before training"
    return Text(text, style="bold")


def _steps(summary: RunSummary) -> str:
    text = f"{summary.steps} in {duration(summary.seconds)}"
    return text if summary.resumed_at is None else f"{text}, resumed after step {summary.resumed_at}"


def print_summary(summary: RunSummary, stream: TextIO, files: tuple[Path, ...] = ()) -> None:
    """Prints the summary: a table that ends with the paths of `files`, and the reward curve in characters."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    width = min(console.width, 100)
    rows = [
        ("outcome", Text(summary.outcome)),
        *([("accuracy", _held_out(summary, lambda point: point.accuracy))] if summary.evaluations else []),
        *([("held-out reward", _held_out(summary, lambda point: point.reward))] if summary.tells_rewards else []),
        ("steps", Text(_steps(summary))),
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
    if curve := curve_text(summary.rewards, width=width, first=summary.rewards_from):
        console.print()
        console.print(Text(curve))
