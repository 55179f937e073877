from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from blockbuster import BlockBuster

from asyncrl.observability.events import (
    SCHEMA_VERSION,
    Event,
    EventLog,
    FaultSeen,
    JobEnded,
    JobStarted,
    StepFinished,
    event_kinds,
    read_events,
)
from asyncrl.observability.line_file import LineFile


def test_an_event_reads_back_with_version_attempt_time_and_kind(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", attempt=2)
    log.emit(JobStarted(pid=7, ranks=2, total_steps=40))
    log.close()
    (line,) = read_events(tmp_path / "events.jsonl")
    assert line.pop("time") > 1.7e9
    assert line == {
        "v": SCHEMA_VERSION, "attempt": 2, "kind": "job_started", "pid": 7, "ranks": 2, "total_steps": 40
    }  # fmt: skip


def test_a_second_attempt_appends_after_the_first(tmp_path: Path) -> None:
    for attempt in range(2):
        log = EventLog(tmp_path / "events.jsonl", attempt)
        log.emit(JobEnded(reason="finished"))
        log.close()
    assert [line["attempt"] for line in read_events(tmp_path / "events.jsonl")] == [0, 1]


def test_a_gap_in_the_log_is_told_by_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    full, good = LineFile(Path("/dev/full")), log._file
    assert good is not None
    log.emit(StepFinished(step=1, seconds=1.0))
    good.lost = full.lost
    for step in (2, 3):
        monkeypatch.setattr(log, "_file", full)
        log.emit(StepFinished(step=step, seconds=1.0))
    good.lost, good.last_error = full.lost, full.last_error
    monkeypatch.setattr(log, "_file", good)
    log.emit(StepFinished(step=4, seconds=1.0))
    log.emit(StepFinished(step=5, seconds=1.0))
    read = [(line["kind"], line.get("step", line.get("count"))) for line in read_events(tmp_path / "events.jsonl")]
    assert read == [("step_finished", 1), ("events_lost", 2), ("step_finished", 4), ("step_finished", 5)]
    assert log.dropped == 2


def test_an_event_of_a_kind_nobody_knows_is_read(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"v":9,"kind":"from_the_future","x":1}\n')
    assert [line["kind"] for line in read_events(tmp_path / "events.jsonl")] == ["from_the_future"]


@pytest.mark.anyio
async def test_emitting_does_not_block_the_event_loop(tmp_path: Path, no_blocking: BlockBuster) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit(FaultSeen(component="engine-0", what="gone"))
    log.close()


def test_recent_events_are_plain_and_bounded() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Many(Event):
        kind: ClassVar[str] = "test_many"
        ids: tuple[str, ...]

    log = EventLog(None)
    for i in range(5000):
        log.emit(Many(ids=(str(i),)))
    assert 1000 <= len(log.recent) <= 2000
    assert list(log.recent[-1]["ids"]) == ["4999"]


def test_two_classes_cannot_share_a_kind() -> None:
    with pytest.raises(
        TypeError, match=r"asyncrl.observability.events.JobStarted already declares event kind 'job_started'"
    ):

        @dataclass(frozen=True, slots=True, kw_only=True)
        class Impostor(Event):
            kind: ClassVar[str] = "job_started"


def test_every_declared_kind_is_listed_with_fields_of_plain_json_types() -> None:
    kinds = {k.kind: k for k in event_kinds() if k.declared_in.startswith("asyncrl.")}
    assert {"job_started", "job_ended", "step_finished", "checkpoint_written", "fault_seen"} <= kinds.keys()
    assert kinds["step_finished"].fields == {"step": "int", "seconds": "float", "version": "str | None"}
    for kind in kinds.values():
        assert re.fullmatch(r"[a-z_]+(\.[a-z_]+)?", kind.kind)
        assert not {"v", "time", "kind"} & kind.fields.keys(), f"{kind.kind} hides a field of the log"
        (definition,) = kind.schema["$defs"].values()
        assert set(definition["properties"]) == kind.fields.keys()
