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
BATCH = RolloutMetrics(**NUMBERS | {"groups": 4, "samples": 32, "reward_mean": 0.5, "failure": "", "reward_parts": {}})
GRPO = {"train/loss": 0.1, "train/trained_tokens": 160.0, "train/groups_without_signal": 0.0}


class Run:
    """A recorder, and what was shown."""

    def __init__(self, directory: Path, attempt: int = 0) -> None:
        self.stream = io.StringIO()
        self.display = PlainDisplay(self.stream)
        self.events = EventLog(None)
        metrics = MetricsLog(directory / "metrics.jsonl", attempt)
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


def test_the_summary_after_a_resume_is_of_the_whole_run(tmp_path: Path) -> None:
    earlier = Run(tmp_path)
    earlier.record.start(4)
    earlier.record.evaluated(0, 0.25, {"eval/accuracy": 0.25, "eval/mean_reward": 0.25}, None)
    for step in (1, 2, 3):
        earlier.step(step, GRPO | {"train/logprob_diff_max": 1e-5 * step}, reward_mean=step / 10, failed_samples=step)
    later = Run(tmp_path, attempt=1)
    later.record.continue_after(2)  # the third step is trained again
    later.record.start(4, 2)
    for step in (3, 4):
        later.step(step, GRPO | {"train/logprob_diff_max": 1e-6}, reward_mean=step / 5)
    later.record.evaluated(4, 0.75, {"eval/accuracy": 0.75, "eval/mean_reward": 0.75}, None)
    summary = later.record.summary("finished", Path("/models/tiny"))
    assert (summary.steps, summary.resumed_at, summary.rewards_from) == (4, 2, 1)
    assert summary.rewards == (0.1, 0.2, 0.6, 0.8)
    assert [step for step, _ in summary.evaluations] == [0, 4] and summary.before is not None
    assert summary.before.accuracy == 0.25
    assert summary.facts["tokens trained"] == 640 and summary.facts["largest log-prob difference"] == 2e-5
    assert summary.facts["failed samples"] == "3 of 131"
    assert summary.seconds == pytest.approx(sum(summary.time_split.values()))
    for run in (earlier, later):
        run.display.stop()


def test_a_run_that_goes_on_from_another_directory_begins_its_curve_there(run: Run) -> None:
    run.record.continue_after(20)
    run.record.start(22, 20)
    for step in (21, 22):
        run.step(step, GRPO, reward_mean=step / 100)
    summary = run.record.summary("finished", Path("/models/tiny"))
    assert (summary.rewards, summary.rewards_from, summary.resumed_at) == ((0.21, 0.22), 21, 20)


def test_a_held_out_mean_reward_is_told_where_it_says_more_than_the_accuracy(run: Run) -> None:
    run.record.start(2)
    run.record.evaluated(0, 0.0, {"eval/accuracy": 0.0, "eval/mean_reward": 0.352}, None)
    run.step(1, GRPO)
    run.step(2, GRPO)
    run.record.evaluated(2, 0.5, {"eval/accuracy": 0.5, "eval/mean_reward": 0.5}, None)
    lines = run.shown()
    assert lines[0] == "held-out accuracy after step 0: 0.000, mean reward 0.352"
    assert "accuracy 0.000, mean reward 0.352" in lines[1] and "accuracy" not in lines[2]
    assert lines[3] == "held-out accuracy after step 2: 0.500"


def test_the_line_of_a_step_shows_a_loss_where_it_tells_something(run: Run) -> None:
    run.record.start(2)
    run.step(1, GRPO | {"train/entropy": 1.5, "train/grad_norm": 0.25})
    run.step(2, {"train/loss": 0.5, "train/trained_tokens": 40.0, "train/entropy": 1.5})
    grpo, sft = run.shown()
    assert "entropy 1.500  grad norm 0.250" in grpo and "loss" not in grpo
    assert "loss 0.500  entropy 1.500" in sft


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
