"""Settings that change nothing are told, and the run begins all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.config.checks.no_effect import settings_without_effect, unused_staleness
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


@pytest.mark.parametrize(
    ("section", "algorithm", "told"),
    [
        ({"kl_coefficient": 0.1}, "grpo", ["algorithm.kl_coefficient has no effect: algorithm.kl is not set"]),
        ({"kl_coefficient": 0.1, "kl": "loss"}, "grpo", []),
        (
            {"correction_upper": 3.0},
            "grpo",
            ["algorithm.correction_upper has no effect: algorithm.correction is not set"],
        ),
        (
            {"overlong_penalty": 0.5},
            "grpo",
            ["algorithm.overlong_penalty has no effect: algorithm.overlong_tokens is not"],
        ),
        ({"teacher": "models/t"}, "grpo", ["algorithm.teacher has no effect: algorithm.teacher_weight is not set"]),
        ({"teacher": "models/t", "kl": "reward"}, "distill", ["algorithm.kl has no effect: distill reads no rewards"]),
        ({"teacher": "models/t"}, "distill", []),
        ({"reference": "models/r"}, "my:Own", []),
    ],
)
def test_a_setting_of_the_algorithm_that_nothing_switches_on_is_told(
    section: dict[str, object], algorithm: str, told: list[str]
) -> None:
    config = Config.model_validate({"algorithm": section, "train": {"algorithm": algorithm}})
    found = [text for text in settings_without_effect(config) if text.startswith("algorithm.")]
    assert len(found) == len(told) and all(a.startswith(b) for a, b in zip(found, told, strict=True))
