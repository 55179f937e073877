"""Lists the samples that a run has kept: `asyncrl samples RUN`. Only reads files; the run may still be going on."""

from __future__ import annotations

import math
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.text import Text

from asyncrl.errors import RunDirectoryError, counted
from asyncrl.observability.line_file import read_lines
from asyncrl.observability.samples.log import OLDER_SAMPLES_FILE, SAMPLES_FILE, Kind
from asyncrl.observability.text_plots import figure

Order = Literal["kept", "reward", "tokens"]
"""Order of a list: as kept, the highest reward first, the longest response first."""


def show_samples(
    run_dir: Path,
    *,
    kind: Kind = "train",
    step: int | None = None,
    order: Order = "kept",
    limit: int | None = None,
    stream: TextIO | None = None,
) -> None:
    """Prints the samples of one step, or of the latest one that has some; at most `limit` of them.

    Raises RunDirectoryError where the run has kept none that fit.
    """
    files = [run_dir / name for name in (OLDER_SAMPLES_FILE, SAMPLES_FILE) if (run_dir / name).is_file()]
    if not files:
        raise RunDirectoryError(
            f"{run_dir}: no {SAMPLES_FILE} in it; give the directory of a run (run.dir) that has sampled, with "
            "samples.per_step over 0"
        )
    samples = chosen_samples((line for file in files for line in read_lines(file)), kind=kind, step=step, order=order)
    console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
    for record in samples[:limit]:
        console.print(sample_text(record))
    if limit is not None and len(samples) > limit:
        console.print(Text(f"{len(samples) - limit} more", style="dim"))


def chosen_samples(
    records: Iterable[dict[str, Any]], *, kind: Kind, step: int | None, order: Order
) -> list[dict[str, Any]]:
    """The samples of one step, of its last attempt. Raises RunDirectoryError where there are none."""
    kept = [record for record in records if record.get("kind") == kind]
    what = "evaluation" if kind == "eval" else "step"
    if not kept:
        raise RunDirectoryError(f"no sample of any {what} was kept so far")
    latest = kept[-1]["step"] if step is None else step
    of_step = [record for record in kept if record["step"] == latest]
    if not of_step:
        steps = sorted({record["step"] for record in kept})
        near = ", ".join(str(number) for number in sorted(steps, key=lambda number: abs(number - latest))[:3])
        raise RunDirectoryError(
            f"no sample of {what} {latest} was kept; there are some of {len(steps)} {what}s from {steps[0]} to "
            f"{steps[-1]}, the nearest {near}"
        )
    attempt = max(record["attempt"] for record in of_step)
    of_step = [record for record in of_step if record["attempt"] == attempt]
    if order == "reward":
        of_step.sort(key=lambda record: -math.inf if record["reward"] is None else record["reward"], reverse=True)
    elif order == "tokens":
        of_step.sort(key=lambda record: record["tokens"], reverse=True)
    return of_step


def sample_text(record: dict[str, Any]) -> Text:
    """One sample for people: a head line, then prompt, response and what was made of it."""
    reward = "no reward" if record["reward"] is None else f"reward {figure(record['reward'])}"
    when = f"evaluation after step {record['step']}" if record["kind"] == "eval" else f"step {record['step']}"
    reason = "cut off" if record["finish_reason"] == "length" else record["finish_reason"]
    ended = f"{counted(record['tokens'], 'token')}, {reason}"
    versions: Sequence[str] = record["versions"]
    weights = f"weights {' then '.join(versions)}" if versions else ""
    head = "  ".join(part for part in (when, record["prompt_id"], reward, ended, weights, record["sample_id"]) if part)
    text = Text.assemble((head, "bold"), "\n")
    turns = record.get("turns")
    said = (
        [("read", turn["read"]) if i % 2 == 0 else ("said", turn["sampled"]) for turn in turns for i in (0, 1)]
        if turns
        else [("prompt", record["prompt"]), ("response", record["response"])]
    )
    for name, content in said:
        _add(text, name, content, "" if name in ("response", "said") else "dim")
    if record["answer"] is not None:
        _add(text, "answer", str(record["answer"]), "green")
    if parts := record.get("reward_parts"):
        _add(text, "parts", "  ".join(f"{name} {figure(value)}" for name, value in parts.items()), "")
    if record["failure"]:
        _add(text, "failure", record["failure"], "yellow")
    return text


def _add(text: Text, name: str, content: str, style: str) -> None:
    """Adds `content` behind its name; further lines are indented."""
    lines = printable(content).split("\n")
    text.append(f"  {name:<9}", "dim")
    text.append("\n           ".join(lines) + "\n", style)


def printable(text: str) -> str:
    """`text` with control characters written as escapes: a response must not drive the reader's terminal."""
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" else c
        for c in text
    )
