"""What happened in a run, read from its directory: attempts, engines, weights, prompt groups, faults, time.

Invariants
- Only files are read: the run may be going on, have ended, or have been killed.
- Nothing is passed over in silence: damaged lines, lost lines and kinds that this version does not know are counted.
- Events are known by their kind and may lack fields (a log of another version); `?` stands for what is missing.
- Where a run has a summary of its own, the report gives that one's times, so that the two never differ.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from asyncrl.errors import RunDirectoryError
from asyncrl.observability.events import SCHEMA_VERSION, UNREADABLE, read_events
from asyncrl.observability.metrics import read_metrics
from asyncrl.observability.reward_curve import curve_text
from asyncrl.observability.summary import SUMMARY_FILE
from asyncrl.observability.text_plots import duration, labelled

Record = Mapping[str, Any]

EVENTS_FILE = "events.jsonl"
METRICS_FILE = "metrics.jsonl"


class _Missing:
    """Stands for a field that an event lacks, in whatever format it is asked for."""

    def __format__(self, _spec: str) -> str:
        return "?"


class _Fields(dict[str, Any]):
    """Fields of an event for `str.format_map`."""

    def __missing__(self, key: str) -> _Missing:
        return _Missing()


def _number(value: object) -> float:
    """`value` where it is a number, else 0: one odd field must not hide the rest of a log."""
    return float(value) if isinstance(value, (int, float)) else 0.0


def _names(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, (list, tuple)) else []


def _engine_state(event: Record) -> str:
    text = "{previous} → {state}".format_map(_Fields(event))
    if event.get("version") is not None:
        text += f", weights {event['version']}"
    return text + (f": {event['reason']}" if event.get("reason") else "")


def _fleet_ready(event: Record) -> str:
    model = event.get("model", "actor")
    engines = "engines" if model == "actor" else f"engines of {model}"
    return f"{event.get('engines', '?')} {engines} ready after " + "{seconds:.1f} s".format_map(_Fields(event))


def _engine_stopped(event: Record) -> str:
    left = "" if event.get("drained", True) else "; requests that it still had were given up"
    return "stopped on request after {seconds:.1f} s".format_map(_Fields(event)) + left


def _transfer_failed(event: Record) -> str:
    engines = event.get("engines") or {}
    lost = "; ".join(f"{name}: {why}" for name, why in engines.items()) if isinstance(engines, Mapping) else engines
    return f"transfer {event.get('transfer', '?')} of {event.get('version', '?')} failed: {event.get('reason') or lost}"


def _evaluated(event: Record) -> str:
    if event.get("skipped") is not None:
        return f"evaluation skipped: {event['skipped']}"
    return "accuracy {accuracy:.3f} on {num_samples} samples".format_map(_Fields(event))


def _loop_started(event: Record) -> str:
    return "steps begin after {seconds:.1f} s: ".format_map(_Fields(event)) + _split(_phases(event))


def _phases(event: Record) -> dict[str, float]:
    phases = event.get("phases")
    return {str(name): _number(seconds) for name, seconds in phases.items()} if isinstance(phases, Mapping) else {}


def _split(phases: Mapping[str, float]) -> str:
    """`generate 2 min 30 s (62%), train 40.0 s (17%)`: largest first, what is under half a percent left out."""
    total = sum(phases.values())
    largest_first = sorted(phases.items(), key=lambda item: item[1], reverse=True)
    parts = [(name, seconds, seconds / total) for name, seconds in largest_first if total and seconds / total >= 0.005]
    return ", ".join(f"{name} {duration(seconds)} ({share:.0%})" for name, seconds, share in parts)


def _process_exited(event: Record) -> str:
    text = "process {pid} was ended" if event.get("requested") else "process {pid} ended unasked with {returncode}"
    return text.format_map(_Fields(event)) + _survivors(event)


def _host_ended(event: Record) -> str:
    return ("ended" if event.get("expected") else "ended unasked") + _survivors(event)


def _survivors(event: Record) -> str:
    return f"; {event['survivors']} of its processes could not be killed" if event.get("survivors") else ""


@dataclass(frozen=True, slots=True)
class _Wording:
    """How an event of the timeline reads: who, and a template over its fields or a function of them."""

    who: str
    text: str | Callable[[Record], str]
    fault: bool = False

    def apply(self, event: Record) -> tuple[str, str]:
        fields = _Fields(event)
        try:
            text = self.text.format_map(fields) if isinstance(self.text, str) else self.text(event)
        except (TypeError, ValueError):  # a field of another type than its format
            text = str(dict(event))
        return self.who.format_map(fields), text


_TIMELINE: Mapping[str, _Wording] = {
    "job_started": _Wording("driver", "attempt {attempt} began: pid {pid}, {ranks} trainer ranks"),
    "job_ended": _Wording("driver", "ended with exit code {exit_code}: {reason}"),
    "loop_started": _Wording("driver", _loop_started),
    "fault_seen": _Wording("{component}", "{what}", fault=True),
    "events_lost": _Wording("event log", "{count} events before this one were lost", fault=True),
    "checkpoint_written": _Wording("driver", "step {step} written to {path} in {seconds:.1f} s"),
    "fleet_ready": _Wording("controller", _fleet_ready),
    "engine_state": _Wording("{engine}", _engine_state),
    "engine_exited": _Wording("{engine}", "process {pid} ended unasked with {returncode}", fault=True),
    "process_restarting": _Wording("{name}", "restart {restarts} follows in {delay_s:.1f} s: {reason}", fault=True),
    "process_given_up": _Wording("{name}", "given up after {restarts} restarts: {reason}", fault=True),
    "engine_caught_up": _Wording("{engine}", "caught up with weights {version} in {seconds:.1f} s and serves"),
    "eval_fleet_pinned": _Wording("evaluation", "{engines} engines hold weights {version} after {seconds:.1f} s"),
    "engine_stopped": _Wording("{engine}", _engine_stopped),
    "router_restarted": _Wording("{router}", "answers again after {seconds:.1f} s and knows {engines} engines"),
    "weight_update_aborted": _Wording("weights", "update to {version} given up: {reason}", fault=True),
    "weight_transfer_failed": _Wording("weights", _transfer_failed, fault=True),
    "weight_update_failed": _Wording("weights", "update to {version} failed: {reason}", fault=True),
    "evaluated": _Wording("evaluation", _evaluated),
    "trainer_ready": _Wording("trainer", "{ranks} ranks ready after {seconds:.1f} s: {tensors} tensors, {bytes} bytes"),
    "trainer_resumed": _Wording("trainer", "goes on from step {step}: {path}"),
    "groups_rolled_back": _Wording("rollouts", lambda e: f"{len(_names(e.get('group_ids')))} ended groups rolled back"),
    "trainer_rank_failed": _Wording("rank {rank}", "failed in {command}: {reason}", fault=True),
    "host_started": _Wording("host", "started: pid {pid}"),
    "host_ended": _Wording("host", _host_ended),
    "process_exited": _Wording("{name}", _process_exited),
}
"""Kinds that are told one by one; other known kinds are counted."""

_GROUP = frozenset({"group_admitted", "group_running", "group_finished", "group_filtered", "group_dropped"})
_GROUPS = frozenset({"groups_delivered", "groups_trained", "groups_restored"})
_FAILURES = frozenset({"request_failed", "requests_aborted", "concurrency_lowered", "reward_failed"})
_ROUTINE = frozenset({"process_spawned", "trainer_stepped", "weight_update_begun", "weight_update_committed"})
_COUNTED = _GROUP | _GROUPS | _FAILURES | _ROUTINE | {"step_finished", "weights_published"}


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One thing that happened."""

    time: float
    """Seconds since the epoch."""
    attempt: int
    who: str
    text: str
    fault: bool


@dataclass(frozen=True, slots=True)
class Publication:
    """One version of the weights that reached the engines."""

    version: str
    engines: int
    seconds: float
    pause_s: float


@dataclass(slots=True)
class RunReport:
    """What `events.jsonl` and `metrics.jsonl` say, gathered."""

    timeline: list[TimelineEntry] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)
    steps: int = 0
    """Steps trained, by the last attempt that says so."""
    groups: Counter[str] = field(default_factory=Counter)
    """Prompt groups by what became of them: admitted, finished, delivered, trained, filtered: why, dropped: why. Ends
    that were rolled back are counted as that alone."""
    ends: dict[str, str] = field(default_factory=dict)
    """Under which of these names a group's end is counted, by its id."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed requests and rewards by their reason."""
    restarts: Counter[str] = field(default_factory=Counter)
    """Restarts of engines and routers, and who was given up, by name."""
    time_split: dict[str, float] = field(default_factory=dict)
    """Seconds by phase over all start-ups and steps, those that were rolled back included; all of a run that has a
    summary."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step, as trained last."""
    ended: str | None = None
    """Why the last attempt ended; None while it runs, and where it was killed."""
    unreadable: int = 0
    newer: int = 0
    """Lines of a schema version that is newer than this program's."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Lines by kinds that are not known here."""


def _is_routine(event: Record) -> bool:
    """An engine's turn through an ordinary weight update: one pair per step, told by the publications instead."""
    return event.get("state") == "updating" or (event.get("previous") == "updating" and event.get("state") == "serving")


def _count(report: RunReport, event: Record) -> None:
    kind = event["kind"]
    if kind in ("trainer_stepped", "step_finished"):  # the first alone where a stop found the step in progress
        report.steps = int(_number(event.get("step")))
    elif kind == "weights_published":
        report.publications.append(
            Publication(
                version=str(event.get("version", "?")),
                engines=len(_names(event.get("engines"))),
                seconds=_number(event.get("seconds")),
                pause_s=_number(event.get("pause_s")),
            )
        )
    elif kind in _GROUPS:
        what, group_ids = kind.removeprefix("groups_"), _names(event.get("group_ids"))
        report.groups[what] += len(group_ids)
        report.ends |= dict.fromkeys(group_ids if what == "trained" else (), what)
    elif kind in ("group_filtered", "group_dropped"):
        what = f"{kind.removeprefix('group_')}: {event.get('reason', '?')}"
        report.groups[what] += 1
        report.ends[str(event.get("group_id"))] = what
    elif kind in ("group_admitted", "group_finished"):
        report.groups[kind.removeprefix("group_")] += 1
    elif kind == "request_failed":
        report.failures[f"request: {event.get('failure', '?')}"] += 1
    elif kind == "requests_aborted":
        report.failures["request: given up and ended in the engines"] += int(_number(event.get("requests")))
    elif kind == "concurrency_lowered":
        report.failures["engines overloaded: concurrency lowered"] += 1
    elif kind == "reward_failed":
        report.failures[f"reward: {event.get('reason', '?')}"] += 1


def build_report(events: Iterable[Record], metrics: Iterable[Record]) -> RunReport:
    """Gathers the lines of an event log and of a metrics log."""
    report = RunReport()
    for event in events:
        kind = str(event.get("kind"))
        if kind == UNREADABLE:
            report.unreadable += 1
            continue
        report.newer += _number(event.get("v")) > SCHEMA_VERSION
        if kind in _TIMELINE:
            if kind == "job_started":
                report.ended = None
            elif kind == "job_ended":
                report.ended = str(event.get("reason", "?"))
            elif kind == "loop_started":
                _add(report.time_split, _phases(event))
            elif kind == "groups_rolled_back":
                ids = _names(event.get("group_ids"))
                report.groups -= Counter(report.ends.pop(group_id, "") for group_id in ids)
                report.groups["rolled back"] += len(ids)
            elif kind == "process_restarting":
                report.restarts[f"{event.get('name', '?')} restarted"] += 1
            elif kind == "process_given_up":
                report.restarts[f"{event.get('name', '?')} given up"] += 1
            if not (kind == "engine_state" and _is_routine(event)):
                wording = _TIMELINE[kind]
                who, text = wording.apply(event)
                at, attempt = _number(event.get("time")), int(_number(event.get("attempt")))
                report.timeline.append(TimelineEntry(at, attempt, who, text, wording.fault))
        elif kind in _COUNTED:
            _count(report, event)
        else:
            report.unknown[kind] += 1
    rewards: dict[int, float] = {}
    for line in metrics:
        _add(
            report.time_split,
            {
                key.removeprefix("time/").removesuffix("_s"): _number(value)
                for key, value in line.items()
                if key.startswith("time/") and key.endswith("_s") and key != "time/step_s"
            },
        )
        if isinstance(reward := line.get("rollout/reward_mean"), (int, float)):
            rewards[int(_number(line.get("step")))] = float(reward)
    report.rewards = [rewards[step] for step in sorted(rewards)]
    return report


def _add(split: dict[str, float], more: Mapping[str, float]) -> None:
    for phase, seconds in more.items():
        split[phase] = split.get(phase, 0.0) + seconds


def _summed_up(path: Path) -> dict[str, float]:
    """The time split of a summary; empty where there is none that can be read."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return _phases({"phases": summary.get("time_split")}) if isinstance(summary, Mapping) else {}


def read_report(run_dir: Path) -> RunReport:
    """Reads a run directory; raises RunDirectoryError where there is no run in it."""
    events = run_dir / EVENTS_FILE
    if not events.is_file():
        raise RunDirectoryError(f"{run_dir}: no {EVENTS_FILE} in it; give the directory of a run (run.dir)")
    metrics = run_dir / METRICS_FILE
    report = build_report(read_events(events), read_metrics(metrics) if metrics.is_file() else ())
    if len({entry.attempt for entry in report.timeline}) == 1:  # a summary speaks of its own attempt alone
        report.time_split = _summed_up(run_dir / SUMMARY_FILE) or report.time_split
    return report


def report(run_dir: Path, stream: TextIO | None = None) -> None:
    """Prints what happened in a run; raises RunDirectoryError where there is no run in `run_dir`."""
    print_report(read_report(run_dir), stream or sys.stdout)


def print_report(report: RunReport, stream: TextIO, *, last: int = 200) -> None:
    """Prints the report; of the timeline at most the `last` entries, and all faults before them."""
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
    return f"{report.steps} steps in {attempts} attempt(s) since {began}, {faults} fault(s): {ended}"


def _sections(report: RunReport) -> list[tuple[str, str]]:
    """Name and text of each part below the timeline that has something to say."""

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
    if split := _split(report.time_split):
        sections.append(("time", split))
    if report.unreadable or report.newer:
        text = f"{report.unreadable} damaged lines, {report.newer} lines of a newer version"
        sections.append(("event log", text))
    if report.unknown:
        sections.append(("not told here", counts(report.unknown)))
    return sections
