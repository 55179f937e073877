"""Settings that change nothing are told, and the run begins all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.checks.no_effect import unused_staleness
from tests.config.conftest import Load


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--data.split", "test"], "data.split has no effect: train.jsonl is one file; only a directory has splits"),
        (
            ["--data.split", "test", "--data.source", "asyncrl.demo.task:train_prompts"],
            "data.split has no effect: asyncrl.demo.task:train_prompts makes its records; only a directory has splits",
        ),
        (["--data.args.max", "3"], "data.args has no effect: train.jsonl is no generated task and no function"),
        (
            ["--eval.data.source", "train.jsonl", "--eval.data.split", "test"],
            "eval.data.split has no effect: train.jsonl is one file; only a directory has splits",
        ),
        (
            ["--warmup.steps", "1", "--warmup.source", "train.jsonl", "--warmup.args.max", "3"],
            "warmup.args has no effect: train.jsonl is no generated task and no function",
        ),
        (
            ["--data.answer_key", "none", "--data.answer_after", "####"],
            "data.answer_after has no effect: data.answer_key is none, so there are no answers",
        ),
    ],
)
def test_a_setting_without_effect_is_told(load: Load, options: list[str], told: str) -> None:
    assert load(*options).warnings == (told,)


def test_settings_with_an_effect_are_not_told(load: Load, recipe: Path) -> None:
    (recipe.parent / "dir").mkdir()
    (recipe.parent / "dir" / "test.jsonl").touch()
    assert load("--data.source", "dir", "--data.split", "test").warnings == ()
    assert load("--data.source", "asyncrl.demo.task:train_prompts", "--data.args.size", "3").warnings == ()


def test_a_bound_on_staleness_above_that_of_a_loop_that_generates_nothing_ahead_is_told(load: Load) -> None:
    told = unused_staleness(load("--rollout.max_staleness", "3", "--train.minibatches", "2").config)
    assert told is not None and told.startswith("rollout.max_staleness = 3 has no effect in this loop")
    assert unused_staleness(load("--rollout.max_staleness", "1", "--train.minibatches", "2").config) is None
    assert unused_staleness(load().config) is None
