"""What a loop tells, and what those who listen make of it."""

from __future__ import annotations

import gc
import io
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.inference.fleet_events import EngineStateChanged
from asyncrl.observability.display import PlainDisplay
from asyncrl.observability.events import EventLog
from asyncrl.observability.metrics import MetricsLog
from asyncrl.rollout.metrics import RolloutMetrics
from asyncrl.run.recorder import Recorder
from asyncrl.weights.publication import PublicationReport

PUBLISHED = PublicationReport(
    version="0.1", seconds=1.0, pause_s=0.5, transfer_s=0.5, bytes=1, attempts=1, engines=("engine-0",), failed={}
)
NUMBERS: dict[str, Any] = dict.fromkeys((field.name for field in fields(RolloutMetrics)), 0)
BATCH = RolloutMetrics(**NUMBERS | {"groups": 4, "samples": 32, "reward_mean": 0.5, "failure": ""})
GRPO = {"train/loss": 0.1, "train/trained_tokens": 160.0, "train/groups_without_signal": 0.0}


class Run:
    """A recorder, and what was shown."""

    def __init__(self, directory: Path) -> None:
        self.stream = io.StringIO()
        self.display = PlainDisplay(self.stream)
        self.events = EventLog(None)
        metrics = MetricsLog(directory / "metrics.jsonl")
        self.record = Recorder(display=self.display, metrics=metrics, events=self.events)
        self.metrics = directory / "metrics.jsonl"

    def step(self, number: int, training: dict[str, float], **rollout: Any) -> None:
        self.record.step(number, replace(BATCH, **rollout), training, PUBLISHED)

    def shown(self) -> list[str]:
        self.display.stop()
        return self.stream.getvalue().splitlines()

    def facts(self) -> dict[str, Any]:
        return dict(self.record.summary("finished", Path("/models/tiny")).facts)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.display.stop()


def test_samples_that_failed_are_told_at_each_step_and_summed_up(run: Run) -> None:
    run.record.start(3)
    run.step(1, GRPO, samples=22, failed_samples=10, failure="ValueError: odd (r.py:3 in score)")
    run.step(2, GRPO)
    run.step(3, GRPO, samples=31, failed_samples=1, dropped_groups=2, failure="generation timeout: late")
    lines = run.shown()
    assert "10 of 32 samples failed (ValueError: odd (r.py:3 in score))" in lines[0]
    assert "failed" not in lines[1]
    assert "1 of 32 samples failed, 2 groups replaced (generation timeout: late)" in lines[2]
    assert run.facts()["failed samples"] == "11 of 96, most often: ValueError: odd (r.py:3 in score)"
    assert run.facts()["groups replaced"] == "2"
    written = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["rollout/failed_samples"] for line in written] == [10, 0, 1]
    assert not any("rollout/failure" in line for line in written)


def test_a_batch_that_teaches_nothing_is_told_once(run: Run) -> None:
    run.record.start(4)
    for step, silent in enumerate((3.0, 4.0, 4.0, 0.0), 1):
        run.step(step, GRPO | {"train/groups_without_signal": silent})
    notes = [line for line in run.shown() if "learned nothing" in line]
    assert len(notes) == 1 and notes[0].startswith("step 2 learned nothing: within each of its 4 groups")
    assert run.facts()["groups without signal"].startswith("11 of 16")


def test_what_was_not_measured_is_not_in_the_summary(run: Run) -> None:
    run.record.start(1)
    run.step(1, {"train/loss": 0.1, "train/trained_tokens": 40.0}, zero_variance_groups=4)
    assert run.facts() == {"model": "/models/tiny", "tokens trained": 40}
    assert "learned nothing" not in "".join(run.shown())


def test_the_largest_logprob_difference_is_kept(run: Run) -> None:
    run.record.start(2)
    run.step(1, GRPO | {"train/logprob_diff_max": 2e-5})
    run.step(2, GRPO | {"train/logprob_diff_max": 1e-5})
    assert run.facts()["largest log-prob difference"] == 2e-5


def test_the_time_before_the_steps_is_an_event(run: Run) -> None:
    with run.record.phase("startup"), run.record.phase("warm-up 0/20"):
        pass
    run.record.start(1)
    (began,) = [event for event in run.events.recent if event["kind"] == "loop_started"]
    assert set(began["phases"]) == {"startup", "warm-up", "other"}
    assert began["seconds"] == pytest.approx(sum(began["phases"].values()))


def test_engines_that_stop_serving_are_shown_once_the_steps_began(run: Run) -> None:
    def state(engine: str, state: str) -> None:
        run.events.emit(EngineStateChanged(engine=engine, generation=0, previous="?", state=state, version=None))

    for engine in ("engine-0", "engine-1"):
        for name in ("starting", "pending_weights", "updating", "serving"):
            state(engine, name)
    run.record.start(2)
    for name in ("updating", "serving", "dead", "starting", "updating", "serving"):
        state("engine-1", name)
    for engine in ("engine-0", "engine-1"):
        state(engine, "stopped")
    assert run.shown() == ["1 of 2 engines serve", "all 2 engines serve"]


def test_a_loop_begins_with_an_interpreter_that_is_set_up_for_it(run: Run) -> None:
    run.record.start(1)
    assert gc.get_freeze_count() > 10_000
