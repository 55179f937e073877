from __future__ import annotations

import io
import json
import string
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import RunDirectoryError
from asyncrl.observability.events import EventLog, FaultSeen, JobEnded, JobStarted, StepFinished, event_kinds
from asyncrl.observability.metrics import MetricsLog
from asyncrl.observability.report import COUNTED, build_report, print_report, read_report, show_report
from asyncrl.observability.timeline import TIMELINE
from asyncrl.training.trainer_events import TrainerStepped


def a_run(run_dir: Path) -> Path:
    for attempt in (0, 1):
        events = EventLog(run_dir / "events.jsonl", attempt)
        metrics = MetricsLog(run_dir / "metrics.jsonl", attempt)
        events.emit(JobStarted(pid=100 + attempt, ranks=2))
        for step in (1, 2):
            metrics.write(
                step, {"rollout/reward_mean": step / 10 + attempt, "time/generate_s": 2.0, "time/step_s": 3.0}
            )
            events.emit(StepFinished(step=step, seconds=3.0))
        if attempt == 0:
            events.emit(FaultSeen(component="engine-1", what="no response from engine-1 after 60 s"))
            with (run_dir / "events.jsonl").open("ab") as file:
                file.write(b'{"v":1,"kind":"torn by a k')
        else:
            events.emit(JobEnded(reason="finished"))
    return run_dir


def line(kind: str, **fields: Any) -> dict[str, Any]:
    return {"v": 1, "attempt": 0, "time": 1000.0, "kind": kind, **fields}


def test_a_step_that_a_stop_found_in_progress_counts(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    events = EventLog(run_dir / "events.jsonl", 2)
    events.emit(TrainerStepped(rollout_id=2, step=3, seconds=1.0))
    events.emit(JobEnded(reason="stopped by SIGTERM", exit_code=143))
    assert read_report(run_dir).steps == 3


def test_a_run_of_two_attempts_is_told(tmp_path: Path) -> None:
    report = read_report(a_run(tmp_path))
    assert report.steps == 2
    assert report.ended == "finished"
    assert [(e.attempt, e.who, e.fault) for e in report.timeline] == [
        (0, "driver", False), (0, "engine-1", True), (1, "driver", False), (1, "driver", False)
    ]  # fmt: skip
    assert report.unreadable == 1
    assert report.time_split == {"generate": 8.0}
    assert report.rewards == [1.1, 1.2]  # those of the last attempt
    stream = io.StringIO()
    print_report(report, stream)
    text = stream.getvalue()
    assert "2 steps in 2 attempts" in text and "1 fault: finished" in text
    assert "no response from engine-1 after 60 s" in text
    assert "1 damaged line," in text


def test_a_run_that_was_killed_says_so(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl").emit(JobStarted(pid=1, ranks=1))
    report = read_report(tmp_path)
    assert report.ended is None
    stream = io.StringIO()
    print_report(report, stream)
    assert "still running, or killed" in stream.getvalue()


def test_a_later_attempt_that_is_still_running_has_not_ended() -> None:
    report = build_report([line("job_started"), line("job_ended", reason="crash"), line("job_started")], [])
    assert report.ended is None


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"no events.jsonl in it; give the directory of a run"):
        read_report(tmp_path)


def test_an_empty_log_has_nothing_to_tell(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    stream = io.StringIO()
    show_report(tmp_path, stream)
    assert stream.getvalue() == "nothing has happened yet\n"


def test_engines_are_told_without_their_turn_through_each_update() -> None:
    def state(previous: str, state: str, **more: Any) -> dict[str, Any]:
        return line("engine_state", engine="engine-0", previous=previous, state=state, **more)

    report = build_report(
        [
            state("starting", "pending_weights"),
            state("pending_weights", "updating"),
            state("updating", "serving", version="0.1"),
            state("serving", "updating"),
            state("updating", "quarantined", reason="checksum differs"),
        ],
        [],
    )
    assert [e.text for e in report.timeline] == [
        "starting → pending_weights", "updating → quarantined: checksum differs"
    ]  # fmt: skip


def test_a_group_that_ended_again_after_a_rollback_is_counted_once() -> None:
    report = build_report(
        [
            line("group_dropped", group_id="2", reason="the job ended"),
            line("groups_trained", rollout_id=0, group_ids=["0", "1"]),
            line("groups_rolled_back", step=0, group_ids=["2", "1"]),
            line("groups_trained", rollout_id=1, group_ids=["1", "2"]),
        ],
        [],
    )
    assert report.groups == {"trained": 3, "rolled back": 2}


def test_groups_and_failures_are_counted_by_reason() -> None:
    report = build_report(
        [
            *[line("group_admitted", group_id=str(i)) for i in range(4)],
            line("groups_trained", rollout_id=0, group_ids=["0", "1"]),
            line("group_dropped", group_id="2", reason="over the context"),
            line("group_filtered", group_id="3", reason="all equal"),
            line("request_failed", failure="timeout"),
            line("reward_failed", reason="timeout"),
        ],
        [],
    )
    assert report.groups == {"admitted": 4, "trained": 2, "dropped: over the context": 1, "filtered: all equal": 1}
    assert report.failures == {"request: timeout": 1, "reward: timeout": 1}


def test_restarts_are_faults_and_counted_by_name() -> None:
    def restart(name: str, restarts: int) -> dict[str, Any]:
        return line("process_restarting", name=name, restarts=restarts, delay_s=1.0, reason="ended with -9")

    report = build_report(
        [
            restart("engine-0", 1),
            line("engine_caught_up", engine="engine-0", generation=2, version="0.3", seconds=1.25),
            restart("router", 1),
            line("router_restarted", router="router", engines=2, seconds=0.5),
            restart("engine-0", 2),
            line("process_given_up", name="engine-0", restarts=2, reason="it hung"),
        ],
        [],
    )
    assert [(e.who, e.text, e.fault) for e in report.timeline] == [
        ("engine-0", "restart 1 follows in 1.0 s: ended with -9", True),
        ("engine-0", "caught up with weights 0.3 in 1.2 s and serves", False),
        ("router", "restart 1 follows in 1.0 s: ended with -9", True),
        ("router", "answers again after 0.5 s and knows 2 engines", False),
        ("engine-0", "restart 2 follows in 1.0 s: ended with -9", True),
        ("engine-0", "given up after 2 restarts: it hung", True),
    ]
    assert report.restarts == {"engine-0 restarted": 2, "router restarted": 1, "engine-0 given up": 1}
    stream = io.StringIO()
    print_report(report, stream)
    assert "engine-0 restarted 2, router restarted 1, engine-0 given up 1" in stream.getvalue()


def test_time_before_the_first_step_counts() -> None:
    report = build_report(
        [line("loop_started", seconds=80.0, phases={"startup": 55.0, "warm-up": 25.0, "other": 0.0})],
        [{"step": 1, "time/generate_s": 20.0, "time/step_s": 20.0}],
    )
    assert report.time_split == {"startup": 55.0, "warm-up": 25.0, "other": 0.0, "generate": 20.0}
    assert [e.text for e in report.timeline] == ["steps begin after 80.0 s: startup 55.0 s (69%), warm-up 25.0 s (31%)"]


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ('{"time_split": {"startup": 7.0, "export": 3.0}}', {"startup": 7.0, "export": 3.0}),
        ("[1]", {"generate": 2.0}),
        ("{torn", {"generate": 2.0}),
    ],
)
def test_the_times_are_those_of_the_summary_where_there_is_one(
    tmp_path: Path, summary: str, expected: dict[str, float]
) -> None:
    EventLog(tmp_path / "events.jsonl").emit(JobStarted(pid=1, ranks=1))
    MetricsLog(tmp_path / "metrics.jsonl").write(1, {"time/generate_s": 2.0})
    (tmp_path / "summary.json").write_text(summary)
    assert read_report(tmp_path).time_split == expected


def test_an_accuracy_is_rounded_and_an_ordinary_end_does_not_alarm() -> None:
    report = build_report(
        [
            line("evaluated", accuracy=0.046875, mean_reward=0.046875, num_samples=64),
            line("evaluated", accuracy=0.0, mean_reward=0.352, num_samples=64),
            line("process_exited", name="engine-0", pid=7, returncode=-9, requested=True, survivors=0),
            line("process_exited", name="engine-0", pid=8, returncode=-9, requested=False, survivors=0),
        ],
        [],
    )
    assert [e.text for e in report.timeline] == [
        "accuracy 0.047 on 64 samples", "accuracy 0.000, mean reward 0.352 on 64 samples",
        "process 7 was ended", "process 8 exited unexpectedly with -9"
    ]  # fmt: skip


def test_weights_are_summed_up() -> None:
    events = [line("weights_published", version=f"0.{i}", engines=["a", "b"], seconds=1.0, pause_s=i) for i in range(3)]
    stream = io.StringIO()
    print_report(build_report([line("job_started"), *events], []), stream)
    assert "3 published, 0.0 to 0.2; engines paused 1.00 s each time, 2.00 s at most" in stream.getvalue()


def test_all_faults_are_shown_however_long_the_log_is() -> None:
    events = [line("fault_seen", component="engine-0", what="first"), *[line("evaluated", accuracy=0.5)] * 50]
    stream = io.StringIO()
    print_report(build_report(events, []), stream, last=10)
    assert "first" in stream.getvalue()
    assert "(40 earlier entries without a fault left out)" in stream.getvalue()
    assert stream.getvalue().count("accuracy") == 10


def test_a_log_of_another_version_is_told_as_far_as_it_goes() -> None:
    nonsense = {"v": "x", "attempt": None, "time": "?", "seconds": "long", "group_ids": 5, "step": [], "engines": 3}
    kinds = [*TIMELINE, *COUNTED, "from_the_future"]
    for event in (dict.fromkeys(nonsense), nonsense, {}):
        report = build_report([{"v": 99, **event, "kind": kind} for kind in kinds], [{"time/x_s": "a", "step": None}])
        assert report.unknown == {"from_the_future": 1}
        print_report(report, io.StringIO())


def test_every_field_that_the_report_names_is_declared() -> None:
    declared = {kind.kind: kind for kind in event_kinds()}
    log_fields = {"attempt", "time"}
    for name, wording in TIMELINE.items():
        templates = [wording.who, wording.text if isinstance(wording.text, str) else ""]
        named = {field for t in templates for _, field, _, _ in string.Formatter().parse(t) if field}
        assert named <= declared[name].fields.keys() | log_fields, name
    known = {*TIMELINE, *COUNTED}
    assert {kind for kind, k in declared.items() if k.declared_in.startswith("asyncrl.")} == known


def test_a_report_reads_a_log_while_it_is_written(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    with (run / "events.jsonl").open("ab") as file:
        file.write(json.dumps(line("fault_seen")).encode()[:-3])
    assert read_report(run).ended == "finished"
