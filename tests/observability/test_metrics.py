from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from blockbuster import BlockBuster
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import RunDirectoryError
from asyncrl.observability.metrics import MetricsLog, StepTimer, metric_line, read_metrics


def test_a_step_is_one_flat_line_of_numbers(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", attempt=1)
    log.write(3, {"train/loss": np.float32(0.5), "rollout/tokens": 100, "time/generate_s": 1.25})
    log.close()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line.pop("time") > 1.7e9
    assert line == {"step": 3, "attempt": 1, "train/loss": 0.5, "rollout/tokens": 100, "time/generate_s": 1.25}


def test_a_number_that_is_not_finite_is_null_and_named(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, {"train/loss": math.nan, "train/grad_norm": math.inf, "train/lr": 1e-3})
    text = (tmp_path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (line["train/loss"], line["train/grad_norm"], line["train/lr"]) == (None, None, 1e-3)
    assert line["nonfinite"] == {"train/loss": "nan", "train/grad_norm": "inf"}


@pytest.mark.parametrize("key", ["loss", "train/", "/loss", "train loss/x", "Train/loss", ""])
def test_a_key_that_is_not_section_and_name_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="is not named section/name"):
        metric_line(1, 0, {key: 1.0})


def test_a_name_that_a_user_chose_is_written_so_that_trackers_take_it() -> None:
    line = metric_line(1, 0, {"rollout/reward/is it right?_mean": 1.0, "train/größe": 2.0, "eval//x": 3.0})
    assert line["rollout/reward/is_it_right__mean"] == 1.0 and line["train/gr_e"] == 2.0 and line["eval/_/x"] == 3.0


def test_text_is_refused_even_where_it_looks_like_a_number() -> None:
    with pytest.raises(TypeError, match="train/loss is text"):
        metric_line(1, 0, {"train/loss": "1.0"})  # type: ignore[dict-item]


def test_metrics_that_cannot_be_kept_end_the_run_with_the_reason() -> None:
    log = MetricsLog(Path("/dev/full"))
    with pytest.raises(RunDirectoryError, match=r"/dev/full: step 1 could not be written \(No space left on device\)"):
        log.write(1, {"train/loss": 1.0})


def test_damaged_lines_are_left_out_when_metrics_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n{"step\n{"step":2}\n{"st')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


@pytest.mark.anyio
async def test_writing_does_not_block_the_event_loop(tmp_path: Path, no_blocking: BlockBuster) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, {"train/loss": 1.0})
    log.close()


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


def test_time_outside_every_phase_is_other() -> None:
    clock = Clock()
    timer = StepTimer(clock_ns=clock)
    clock.advance(1)
    with timer.phase("generate"):
        clock.advance(2)
    with timer.phase("train"):
        clock.advance(3)
    clock.advance(4)
    step = timer.finish_step()
    assert step.seconds == 10
    assert step.phases == {"generate": 2, "train": 3, "other": 5}
    assert step.metrics() == {"time/step_s": 10, "time/generate_s": 2, "time/train_s": 3, "time/other_s": 5}


def test_the_time_of_an_inner_phase_is_not_the_outers() -> None:
    clock = Clock()
    timer = StepTimer(clock_ns=clock)
    with timer.phase("train"):
        clock.advance(1)
        with timer.phase("publish"):
            clock.advance(2)
        clock.advance(4)
    assert timer.finish_step().phases == {"train": 5, "publish": 2, "other": 0}


def test_a_phase_that_raises_is_accounted_for() -> None:
    clock = Clock()
    timer = StepTimer(clock_ns=clock)
    with pytest.raises(ZeroDivisionError), timer.phase("train"):
        clock.advance(1)
        _ = 1 / 0
    clock.advance(2)
    assert timer.finish_step().phases == {"train": 1, "other": 2}


def test_totals_cover_all_steps_and_the_unfinished_one() -> None:
    clock = Clock()
    timer = StepTimer(clock_ns=clock)
    for _ in range(3):
        with timer.phase("generate"):
            clock.advance(1)
        timer.finish_step()
    clock.advance(0.5)
    assert timer.totals().phases == {"generate": 3, "other": 0.5}
    assert timer.totals().seconds == 3.5


def test_a_step_that_ends_within_a_phase_splits_it() -> None:
    clock = Clock()
    timer = StepTimer(clock_ns=clock)
    with timer.phase("eval"):
        clock.advance(1)
        assert timer.finish_step().phases == {"eval": 1, "other": 0}
        clock.advance(2)
    assert timer.finish_step().phases == {"eval": 2, "other": 0}


def test_a_count_in_a_phase_is_shown_but_not_accounted_apart() -> None:
    clock, told = Clock(), list[str]()
    timer = StepTimer(clock_ns=clock, on_phase=told.append)
    for name in ("warm-up 1/2", "warm-up 2/2", "warm-up"):
        with timer.phase(name):
            clock.advance(1)
    assert timer.finish_step().phases == {"warm-up": 3, "other": 0}
    assert told[0] == "warm-up 1/2"


def test_changes_of_phase_are_told() -> None:
    told: list[str] = []
    timer = StepTimer(on_phase=told.append)
    with timer.phase("train"), timer.phase("publish"):
        pass
    assert told == ["train", "publish", "train", "other"]


actions = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "finish"]), st.sampled_from(["generate", "train", "eval"]), st.floats(0, 1e4)
    )
)


@given(actions)
def test_phases_always_add_up_to_the_wall_time(script: list[tuple[str, str, float]]) -> None:
    clock = Clock()
    timer = StepTimer(clock_ns=clock)
    entered = []
    steps = []
    for action, name, seconds in script:
        clock.advance(seconds)
        if action == "enter":
            phase = timer.phase(name)
            phase.__enter__()
            entered.append(phase)
        elif action == "leave" and entered:
            entered.pop(len(name) % len(entered)).__exit__(None, None, None)  # also phases that are not the innermost
        elif action == "finish":
            steps.append(timer.finish_step())
    for time in (*steps, timer.totals()):
        assert math.isclose(sum(time.phases.values()), time.seconds, abs_tol=1e-6)
    assert math.isclose(timer.totals().seconds, clock.now / 1e9, abs_tol=1e-9)
    last = timer.finish_step()
    assert math.isclose(sum(s.seconds for s in steps) + last.seconds, clock.now / 1e9, abs_tol=1e-6)
