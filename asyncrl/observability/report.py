"""What happened in a run, read from its directory: attempts, engines, weights, prompt groups, faults, time.

Invariants
- The report only reads files. The run may still be going on, have ended, or have been killed.
- The report hides nothing: it counts damaged lines, lost lines, and lines of kinds that this version does not know.
- If a run has a summary, the report shows the times of the summary, so that the two never differ.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from asyncrl.errors import RunDirectoryError, counted
from asyncrl.observability.events import SCHEMA_VERSION, UNREADABLE, read_events
from asyncrl.observability.metrics import read_metrics
from asyncrl.observability.reward_curve import curve_text
from asyncrl.observability.summary import SUMMARY_FILE
from asyncrl.observability.text_plots import labelled, time_durations_text
from asyncrl.observability.timeline import TIMELINE, Record, TimelineEntry, is_routine, names, number, phases

EVENTS_FILE = "events.jsonl"
METRICS_FILE = "metrics.jsonl"

COUNTED = frozenset(
    {
        *("group_admitted", "group_running", "group_finished", "group_filtered", "group_dropped"),
        *("groups_delivered", "groups_trained", "groups_restored"),
        *("request_failed", "requests_aborted", "concurrency_lowered", "reward_failed"),
        *("process_spawned", "trainer_stepped", "weight_update_begun", "weight_update_committed"),
        *("step_finished", "weights_published"),
    }
)
"""Kinds that the report knows and gives no line of their own."""


@dataclass(frozen=True, slots=True)
class Publication:
    """One version of the weights that reached the engines."""

    version: str
    """`attempt.step`."""
    engines: int
    """Number of engines that took it."""
    seconds: float
    """Duration of the whole publication."""
    pause_s: float
    """Time for which engines were paused."""


@dataclass(slots=True)
class RunReport:
    """The contents of `events.jsonl` and `metrics.jsonl`, summed up."""

    timeline: list[TimelineEntry] = field(default_factory=list)
    """One entry for each event of a kind in `TIMELINE`, in the order of the log, without routine ones."""
    publications: list[Publication] = field(default_factory=list)
    """In the order of the log."""
    steps: int = 0
    """Steps trained, by the last event that names a step."""
    groups: Counter[str] = field(default_factory=Counter)
    """Number of prompt groups by outcome: `admitted`, `finished`, `delivered`, `trained`, `filtered: why`,
    `dropped: why`, `rolled back`. A group that was rolled back no longer counts under its earlier end."""
    ends: dict[str, str] = field(default_factory=dict)
    """Outcome under which `groups` counts the end of a group, by group id."""
    failures: Counter[str] = field(default_factory=Counter)
    """Number of failed requests and rewards, by reason."""
    restarts: Counter[str] = field(default_factory=Counter)
    """Number of restarts of engines and routers, and of those that were given up, by name."""
    time_split: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: those of the summary if the run has one, else the sum over all start-ups and steps, including
    steps that were rolled back."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step; of a step that was trained again, the last one."""
    ended: str | None = None
    """Why the last attempt ended; None if it is running or was killed."""
    unreadable: int = 0
    """Number of damaged lines."""
    newer: int = 0
    """Number of lines whose schema version is newer than this program's."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Number of lines by kind, for kinds that this version does not know."""


def build_report(events: Iterable[Record], metrics: Iterable[Record]) -> RunReport:
    """Sums up the lines of an event log and of a metrics log."""
    report = RunReport()
    for event in events:
        kind = str(event.get("kind"))
        if kind == UNREADABLE:
            report.unreadable += 1
            continue
        report.newer += number(event.get("v")) > SCHEMA_VERSION
        _count(report, kind, event)
        if kind in TIMELINE:
            if not is_routine(event):
                report.timeline.append(TIMELINE[kind].entry(event))
        elif kind not in COUNTED:
            report.unknown[kind] += 1
    rewards: dict[int, float] = {}
    for line in metrics:
        times = {
            key.removeprefix("time/").removesuffix("_s"): number(value)
            for key, value in line.items()
            if key.startswith("time/") and key.endswith("_s") and key != "time/step_s"
        }
        _add(report.time_split, times)
        if isinstance(reward := line.get("rollout/reward_mean"), (int, float)):
            rewards[int(number(line.get("step")))] = float(reward)
    report.rewards = [rewards[step] for step in sorted(rewards)]
    return report


def _of(outcome: str, group_id: str) -> str:
    """`trained`, or `trained (code)` for a group whose id tells of an executor with a name."""
    executor, dash, _ = group_id.rpartition("-")
    return f"{outcome} ({executor})" if dash else outcome


def _count(report: RunReport, kind: str, event: Record) -> None:
    """Adds `event` to the figures of `report`."""
    group_ids = names(event.get("group_ids"))
    match kind:
        case "job_started":
            report.ended = None
        case "job_ended":
            report.ended = str(event.get("reason", "?"))
        case "loop_started":
            _add(report.time_split, phases(event.get("phases")))
        case "trainer_stepped" | "step_finished":  # a step that a stop interrupted has only the first
            report.steps = int(number(event.get("step")))
        case "weights_published":
            version, engines = str(event.get("version", "?")), len(names(event.get("engines")))
            seconds, pause_s = number(event.get("seconds")), number(event.get("pause_s"))
            report.publications.append(Publication(version, engines, seconds, pause_s))
        case "groups_delivered" | "groups_trained" | "groups_restored":
            outcome = kind.removeprefix("groups_")
            report.groups.update(_of(outcome, group_id) for group_id in group_ids)
            if outcome == "trained":
                report.ends |= {group_id: _of(outcome, group_id) for group_id in group_ids}
        case "groups_rolled_back":
            report.groups -= Counter(report.ends.pop(group_id, "") for group_id in group_ids)
            report.groups.update(_of("rolled back", group_id) for group_id in group_ids)
        case "group_filtered" | "group_dropped":
            group_id = str(event.get("group_id"))
            outcome = _of(f"{kind.removeprefix('group_')}: {event.get('reason', '?')}", group_id)
            report.groups[outcome] += 1
            report.ends[group_id] = outcome
        case "group_admitted" | "group_finished":
            report.groups[_of(kind.removeprefix("group_"), str(event.get("group_id")))] += 1
        case "request_failed":
            report.failures[f"request: {event.get('failure', '?')}"] += 1
        case "requests_aborted":
            report.failures["request: given up and aborted in the engines"] += int(number(event.get("requests")))
        case "concurrency_lowered":
            report.failures["engines overloaded: concurrency lowered"] += 1
        case "reward_failed":
            report.failures[f"reward: {event.get('reason', '?')}"] += 1
        case "process_restarting":
            report.restarts[f"{event.get('name', '?')} restarted"] += 1
        case "process_given_up":
            report.restarts[f"{event.get('name', '?')} given up"] += 1


def _add(split: dict[str, float], more: Mapping[str, float]) -> None:
    for phase, seconds in more.items():
        split[phase] = split.get(phase, 0.0) + seconds


def _summed_up(path: Path) -> dict[str, float]:
    """Returns the time split of a summary; empty if there is none that can be read."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return phases(summary.get("time_split")) if isinstance(summary, Mapping) else {}


def read_report(run_dir: Path) -> RunReport:
    """Reads a run directory; raises RunDirectoryError if it holds no run."""
    events = run_dir / EVENTS_FILE
    if not events.is_file():
        raise RunDirectoryError(f"{run_dir}: no {EVENTS_FILE} in it; give the directory of a run (run.dir)")
    metrics = run_dir / METRICS_FILE
    report = build_report(read_events(events), read_metrics(metrics) if metrics.is_file() else ())
    if len({entry.attempt for entry in report.timeline}) == 1:  # a summary leaves out steps that were rolled back
        report.time_split = _summed_up(run_dir / SUMMARY_FILE) or report.time_split
    return report


def show_report(run_dir: Path, stream: TextIO | None = None) -> None:
    """Prints what happened in a run, to stdout by default; raises RunDirectoryError if `run_dir` holds no run."""
    print_report(read_report(run_dir), stream or sys.stdout)


def print_report(report: RunReport, stream: TextIO, *, last: int = 200) -> None:
    """Prints the report, with the `last` entries of the timeline and all faults before them."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    start = report.timeline[0].time if report.timeline else 0.0
    console.print(Text(_headline(report, start), style="bold"))

    cut = max(0, len(report.timeline) - last)
    shown = [entry for i, entry in enumerate(report.timeline) if i >= cut or entry.fault]
    if left_out := len(report.timeline) - len(shown):
        console.print(Text(f"({left_out} earlier entries without a fault left out)", style="dim"))
    for entry in shown:
        style = "red" if entry.fault else ""
        console.print(Text.assemble((f"{entry.time - start:9.1f} s  {entry.who:<14}  ", "dim"), (entry.text, style)))

    for row in labelled([(name, Text(text)) for name, text in _sections(report)]):
        console.print(row)
    if curve := curve_text(report.rewards, width=min(console.width, 100)):
        console.print(Text(curve))


def _headline(report: RunReport, start: float) -> str:
    if not report.timeline:
        return "nothing has happened yet"
    attempts = len({entry.attempt for entry in report.timeline})
    faults = sum(entry.fault for entry in report.timeline)
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start))
    ended = report.ended or "still running, or killed"
    attempted = f"{counted(report.steps, 'step')} in {counted(attempts, 'attempt')}"
    return f"{attempted} since {began}, {counted(faults, 'fault')}: {ended}"


def _sections(report: RunReport) -> list[tuple[str, str]]:
    """Returns name and text of each section below the timeline, without empty ones."""

    def counts(counter: Mapping[str, int]) -> str:
        return ", ".join(f"{name} {count}" for name, count in counter.items())

    sections = []
    if published := report.publications:
        pauses = [p.pause_s for p in published]
        text = f"{len(published)} published, {published[0].version} to {published[-1].version}; "
        text += f"engines paused {sum(pauses) / len(pauses):.2f} s each time, {max(pauses):.2f} s at most"
        sections.append(("weights", text))
    if report.groups:
        sections.append(("prompt groups", counts(report.groups)))
    if report.failures:
        sections.append(("failures", counts(report.failures)))
    if report.restarts:
        sections.append(("processes", counts(report.restarts)))
    if split := time_durations_text(report.time_split):
        sections.append(("time", split))
    if report.unreadable or report.newer:
        text = f"{counted(report.unreadable, 'damaged line')}, {counted(report.newer, 'line')} of a newer version"
        sections.append(("event log", text))
    if report.unknown:
        sections.append(("unknown events", counts(report.unknown)))
    return sections
