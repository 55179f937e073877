"""The timeline of a run: the wording of each event that the report shows as a line of its own.

Invariants
- An event is identified by its kind and may lack fields (a log of another version): `?` stands for a missing field.
- A field of an unexpected type never hides an event: the line then shows all fields of the event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import counted
from asyncrl.observability.text_plots import figure, time_durations_text

Record = Mapping[str, Any]
"""One decoded line of a log."""


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One line of the timeline."""

    time: float
    """Seconds since the epoch."""
    attempt: int
    """Attempt of the job that logged the event."""
    who: str
    """Part of the job that the line is about: `driver`, `engine-0`."""
    text: str
    """What happened."""
    fault: bool
    """True if something went wrong."""


class _Missing:
    """Stands for a field that an event lacks; reads `?` in every format, and `? engines` where the format is a noun."""

    def __format__(self, spec: str) -> str:
        return f"? {spec}s" if _is_noun(spec) else "?"


class _Count(int):
    """A number of things: with a noun as its format it reads `1 engine` or `2 engines`."""

    def __format__(self, spec: str) -> str:
        return counted(self, spec) if _is_noun(spec) else super().__format__(spec)


def _is_noun(spec: str) -> bool:
    return len(spec) > 1 and spec.replace(" ", "").isalpha()


class _Fields(dict[str, Any]):
    """Fields of an event, for `str.format_map`; numbers take a noun as their format: `{engines:engine}`."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        return _Count(value) if type(value) is int else value

    def __missing__(self, key: str) -> _Missing:
        return _Missing()


def number(value: object) -> float:
    """Returns `value` if it is a number, else 0: one unexpected field must not hide the rest of a log."""
    return float(value) if isinstance(value, (int, float)) else 0.0


def names(value: object) -> list[str]:
    """Returns the items of a list as text; empty for anything that is not a list."""
    return [str(name) for name in value] if isinstance(value, (list, tuple)) else []


def phases(value: object) -> dict[str, float]:
    """Returns the seconds by phase in a time split; empty for anything that is not one."""
    return {str(name): number(seconds) for name, seconds in value.items()} if isinstance(value, Mapping) else {}


def _engine_state(event: Record) -> str:
    text = "{previous} → {state}".format_map(_Fields(event))
    if event.get("version") is not None:
        text += f", weights {event['version']}"
    return text + (f": {event['reason']}" if event.get("reason") else "")


def _fleet_ready(event: Record) -> str:
    model = event.get("model", "actor")
    of = "" if model == "actor" else f" of {model}"
    return (
        "{engines:engine}".format_map(_Fields(event)) + of + " ready after {seconds:.1f} s".format_map(_Fields(event))
    )


def _engine_stopped(event: Record) -> str:
    left = "" if event.get("drained", True) else "; its remaining requests were given up"
    return "stopped on request after {seconds:.1f} s".format_map(_Fields(event)) + left


def _resumed(event: Record) -> str:
    layouts = f", in another layout: {event['other_layout']}" if event.get("other_layout") else ""
    return "resumes from step {step}: {path}".format_map(_Fields(event)) + layouts


def _transfer_failed(event: Record) -> str:
    engines = event.get("engines") or {}
    lost = "; ".join(f"{name}: {why}" for name, why in engines.items()) if isinstance(engines, Mapping) else engines
    return f"transfer {event.get('transfer', '?')} of {event.get('version', '?')} failed: {event.get('reason') or lost}"


def _evaluated(event: Record) -> str:
    if event.get("skipped") is not None:
        return f"evaluation skipped: {event['skipped']}"
    told = "accuracy {accuracy:.3f}".format_map(_Fields(event))
    if (reward := event.get("mean_reward")) is not None and reward != event.get("accuracy"):
        told += f", mean reward {figure(reward)}"
    told += " on {num_samples:sample}".format_map(_Fields(event))
    versions = names(event.get("versions"))
    return told + (f", of weights {', '.join(versions)}" if versions else "")


def _loop_started(event: Record) -> str:
    return "steps begin after {seconds:.1f} s: ".format_map(_Fields(event)) + time_durations_text(
        phases(event.get("phases"))
    )


def _process_exited(event: Record) -> str:
    text = (
        "process {pid} was ended" if event.get("requested") else "process {pid} exited unexpectedly with {returncode}"
    )
    return text.format_map(_Fields(event)) + _survivors(event)


def _host_ended(event: Record) -> str:
    return ("ended" if event.get("expected") else "ended unexpectedly") + _survivors(event)


def _survivors(event: Record) -> str:
    return f"; {event['survivors']} of its processes could not be killed" if event.get("survivors") else ""


@dataclass(frozen=True, slots=True)
class Wording:
    """How the timeline words events of one kind."""

    who: str
    """Template over the event's fields for `TimelineEntry.who`."""
    text: str | Callable[[Record], str]
    """Template over the event's fields, or a function of the event, for `TimelineEntry.text`."""
    fault: bool = False
    """True if an event of this kind means that something went wrong."""

    def entry(self, event: Record) -> TimelineEntry:
        """Returns the line for `event`."""
        fields = _Fields(event)
        try:
            text = self.text.format_map(fields) if isinstance(self.text, str) else self.text(event)
        except (TypeError, ValueError):  # a field does not have the type that the wording expects
            text = str(dict(event))
        at, attempt = number(event.get("time")), int(number(event.get("attempt")))
        return TimelineEntry(at, attempt, self.who.format_map(fields), text, self.fault)


TIMELINE: Mapping[str, Wording] = {
    "job_started": Wording("driver", "attempt {attempt} began: pid {pid}, {ranks:trainer rank}"),
    "job_ended": Wording("driver", "ended with exit code {exit_code}: {reason}"),
    "loop_started": Wording("driver", _loop_started),
    "fault_seen": Wording("{component}", "{what}", fault=True),
    "events_lost": Wording("event log", "{count:event} lost before this one", fault=True),
    "checkpoint_written": Wording("driver", "step {step} written to {path} in {seconds:.1f} s"),
    "fleet_ready": Wording("controller", _fleet_ready),
    "engine_state": Wording("{engine}", _engine_state),
    "engine_exited": Wording("{engine}", "process {pid} exited unexpectedly with {returncode}", fault=True),
    "process_restarting": Wording("{name}", "restart {restarts} follows in {delay_s:.1f} s: {reason}", fault=True),
    "process_given_up": Wording("{name}", "given up after {restarts:restart}: {reason}", fault=True),
    "engine_caught_up": Wording("{engine}", "caught up with weights {version} in {seconds:.1f} s and serves"),
    "eval_fleet_pinned": Wording("evaluation", "weights {version} on {engines:engine} after {seconds:.1f} s"),
    "engine_stopped": Wording("{engine}", _engine_stopped),
    "router_restarted": Wording("{router}", "answers again after {seconds:.1f} s and knows {engines:engine}"),
    "weight_update_aborted": Wording("weights", "update to {version} given up: {reason}", fault=True),
    "weight_transfer_failed": Wording("weights", _transfer_failed, fault=True),
    "weight_update_failed": Wording("weights", "update to {version} failed: {reason}", fault=True),
    "evaluated": Wording("evaluation", _evaluated),
    "trainer_ready": Wording("trainer", "{ranks:rank} ready after {seconds:.1f} s: {tensors:tensor}, {bytes:byte}"),
    "trainer_resumed": Wording("trainer", _resumed),
    "correction_switched_on": Wording(
        "trainer", "corrects for tokens of other weights from step {step} on: the mismatch was {mismatch:.3g} nat"
    ),
    "groups_rolled_back": Wording(
        "rollouts", lambda e: counted(len(names(e.get("group_ids"))), "ended group") + " rolled back"
    ),
    "trainer_rank_failed": Wording("rank {rank}", "failed in {command}: {reason}", fault=True),
    "host_started": Wording("host", "started: pid {pid}"),
    "host_ended": Wording("host", _host_ended),
    "process_exited": Wording("{name}", _process_exited),
}
"""Wording by kind, for all kinds that get a line of their own. The report counts events of other known kinds."""


def is_routine(event: Record) -> bool:
    """True for the two state changes of an engine in an ordinary weight update.

    The timeline leaves them out: there is one pair per step, and the report sums up the publications instead.
    """
    return event.get("kind") == "engine_state" and (
        event.get("state") == "updating" or (event.get("previous") == "updating" and event.get("state") == "serving")
    )
