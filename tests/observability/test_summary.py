from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import pytest

from asyncrl.errors import RunDirectoryError
from asyncrl.observability.reward_curve import curve_text, moving_mean
from asyncrl.observability.run_view import HeldOut
from asyncrl.observability.summary import RunSummary, print_summary, write_curve, write_summary
from asyncrl.observability.text_plots import figure

REWARDS = tuple(0.4 + 0.5 / (1 + math.exp(-(i - 20) / 5)) for i in range(40))


def a_summary(**changes: object) -> RunSummary:
    values: dict[str, object] = {
        "seconds": 300.0,
        "steps": 40,
        "time_split": {"startup": 30.0, "generate": 150.0, "train": 100.0, "other": 20.0},
        "export": "runs/demo/export",
        "rewards": REWARDS,
        "evaluations": ((0, HeldOut(0.41, 0.41)), (40, HeldOut(0.95, 0.95))),
        "facts": {"model": "runs/demo-model", "largest log-prob difference": 3.21e-5},
    }
    return RunSummary(**(values | changes))  # type: ignore[arg-type]


def test_the_summary_file_holds_what_was_promised(tmp_path: Path) -> None:
    summary_json, curve_png = write_summary(a_summary(), tmp_path), write_curve(a_summary(), tmp_path)
    assert curve_png is not None
    record = json.loads(summary_json.read_text())
    assert record["accuracy_before"] == 0.41
    assert record["accuracy_after"] == 0.95
    assert record["seconds"] == 300.0
    assert record["steps"] == 40
    assert record["time_split"] == {"startup": 30.0, "generate": 150.0, "train": 100.0, "other": 20.0}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["reward_curve.png", "summary.json"]
    width, height = (int.from_bytes(curve_png.read_bytes()[at : at + 4], "big") for at in (16, 20))  # PNG header
    assert (width, height) == (1200, 675)


@pytest.mark.parametrize("rewards", [(0.5,), (math.nan, 0.5, 0.6), (math.nan, math.nan)])
def test_a_run_of_few_or_odd_rewards_is_summed_up(tmp_path: Path, rewards: tuple[float, ...]) -> None:
    summary = a_summary(rewards=rewards, evaluations=(), facts={"largest difference": math.inf})
    path = write_summary(summary, tmp_path)
    assert write_curve(summary, tmp_path) is not None
    record = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert len(record["rewards"]) == len(rewards)
    print_summary(summary, io.StringIO(), (path,))


def test_a_run_that_trained_nothing_has_no_curve(tmp_path: Path) -> None:
    summary = a_summary(
        steps=0,
        rewards=(),
        evaluations=((0, HeldOut(0.41, 0.41)),),
        time_split={},
        export=None,
        outcome="stopped by SIGINT",
    )
    assert write_summary(summary, tmp_path).name == "summary.json"
    assert write_curve(summary, tmp_path) is None
    stream = io.StringIO()
    print_summary(summary, stream)
    assert "stopped by SIGINT" in stream.getvalue()
    assert "0.410\n" in stream.getvalue() and "→" not in stream.getvalue()


def test_a_single_point_says_when_it_was_measured_where_training_went_on(tmp_path: Path) -> None:
    for step, when in ((0, "0.410 before training"), (20, "0.410 after step 20"), (40, "0.410\n")):
        stream = io.StringIO()
        print_summary(a_summary(evaluations=((step, HeldOut(0.41, 0.41)),)), stream)
        assert when in stream.getvalue()


def test_the_terminal_shows_accuracies_time_and_the_curve(tmp_path: Path) -> None:
    stream = io.StringIO()
    print_summary(a_summary(), stream, (tmp_path / "summary.json", tmp_path / "reward_curve.png"))
    text = stream.getvalue()
    assert "0.410 → 0.950" in text and "held-out reward" not in text
    assert "40 in 5 min 00 s" in text
    assert "generate 2 min 30 s (50%)" in text
    assert "3.21e-05" in text
    assert str(tmp_path / "reward_curve.png") in text
    assert "mean reward, moving mean of 4 steps" in text
    assert any("\u2800" < c <= "\u28ff" for c in text)  # the curve itself, in braille
    assert "\x1b" not in text


def test_text_of_the_run_is_not_read_as_markup() -> None:
    stream = io.StringIO()
    print_summary(a_summary(outcome="[red]engine[/nonsense] died", facts={"[x]": "[/]"}), stream)
    assert "[red]engine[/nonsense] died" in stream.getvalue()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"gone: the summary cannot be written \(No such file or directory\)"):
        write_summary(a_summary(), tmp_path / "gone")


def test_the_moving_mean_ignores_what_is_not_finite() -> None:
    assert moving_mean([1.0, 3.0, math.nan, 5.0], 2) == [1.0, 2.0, 3.0, 5.0]
    assert math.isnan(moving_mean([math.nan], 2)[0])


def test_what_was_not_evaluated_is_not_mentioned() -> None:
    stream = io.StringIO()
    print_summary(a_summary(evaluations=()), stream)
    assert "accuracy" not in stream.getvalue() and "evaluated" not in stream.getvalue()


def test_a_reward_that_never_changed_is_a_sentence() -> None:
    assert curve_text((0.0,) * 20) == "mean reward 0.000 at each of 20 steps"


def test_the_curve_in_characters_rises_with_the_reward() -> None:
    rows = curve_text(REWARDS, width=60, height=12).splitlines()
    assert all(len(row) <= 60 for row in rows)
    first_ink = [
        min(i for i, c in enumerate(row) if "\u2800" < c <= "\u28ff")
        for row in rows
        if any("\u2800" < c <= "\u28ff" for c in row)
    ]
    assert first_ink == sorted(first_ink, reverse=True)
    assert curve_text([0.5]) == ""


def test_an_evaluation_with_rewards_between_0_and_1_shows_how_its_mean_reward_rose(tmp_path: Path) -> None:
    stream = io.StringIO()
    graded = a_summary(evaluations=((0, HeldOut(0.0, 0.21)), (40, HeldOut(0.0, 0.64))))
    print_summary(graded, stream)
    rows = [line.split() for line in stream.getvalue().splitlines()]
    assert ["accuracy", "0.000", "→", "0.000"] in rows and ["held-out", "reward", "0.210", "→", "0.640"] in rows
    record = json.loads(write_summary(graded, tmp_path).read_text())
    assert (record["reward_before"], record["reward_after"], record["accuracy_after"]) == (0.21, 0.64, 0.0)
    assert record["held_out_rewards"] == [[0, 0.21], [40, 0.64]] and record["accuracies"] == [[0, 0.0], [40, 0.0]]


def test_the_summary_of_a_resumed_run_says_where_this_attempt_began(tmp_path: Path) -> None:
    stream = io.StringIO()
    resumed = a_summary(resumed_at=20, rewards=REWARDS[20:], rewards_from=21)
    print_summary(resumed, stream)
    assert "40 in 5 min 00 s, resumed after step 20" in stream.getvalue()
    assert "21" in stream.getvalue().split("mean reward, moving mean")[1], "the curve begins at the step after"
    assert write_curve(resumed, tmp_path) is not None


def test_a_large_reward_prints_few_digits() -> None:
    assert [figure(value) for value in (4.9e29, -4.9e29, 2.5e-6, 0.25, 0.0, 123456.0, math.nan, math.inf)] == [
        "4.9e+29", "-4.9e+29", "2.5e-06", "0.250", "0.000", "123456.000", "nan", "inf"
    ]  # fmt: skip
    stream = io.StringIO()
    print_summary(a_summary(rewards=tuple(4.9e29 * reward for reward in REWARDS)), stream)
    assert re.search(r"\d{9}", stream.getvalue()) is None
