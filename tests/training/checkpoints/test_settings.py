"""Which settings are told of where training goes on under others."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.config.reading.toml import config_toml
from asyncrl.training.checkpoints.settings import changed_settings

SAVED = config_toml(Config())


@pytest.mark.parametrize(
    ("section", "setting", "value", "told"),
    [
        ("train", "lr", 1e-3, "train.lr was 1e-05, is 0.001"),
        ("train", "num_steps", None, "train.num_steps was 100, is none"),
        ("train", "lr_decay", "cosine", "train.lr_decay was 'constant', is 'cosine'"),
        ("algorithm", "normalize_advantages", False, "algorithm.normalize_advantages was none, is false"),
        ("rollout", "max_staleness", 2, "rollout.max_staleness was none, is 2"),
        ("model", "path", "models/other", "model.path was 'runs/demo-model', is 'models/other'"),
        ("data", "source", "other.jsonl", "data.source was '', is 'other.jsonl'"),
        ("data", "args", {"max_terms": 3}, None),
        ("model", "context_length", 128, None),
        ("train", "max_tokens_per_microbatch", 9, None),
        ("train", "recompute", "full", None),
        ("train", "optimizer_on_host", True, None),
        ("rollout", "temperature", 0.5, None),
        ("run", "dir", "elsewhere", None),
    ],
)
def test_what_changes_the_training_itself_is_told_and_nothing_else(
    section: str, setting: str, value: Any, told: str | None
) -> None:
    config = Config.model_validate({section: {setting: value}})
    assert changed_settings(SAVED, config) == (() if told is None else (told,))


def test_a_setting_that_another_version_did_not_have_counts_as_unchanged() -> None:
    saved = "".join(line for line in SAVED.splitlines(keepends=True) if not line.startswith(("lr =", "[rollout]")))
    assert changed_settings(saved, Config.model_validate({"train": {"lr": 1.0}})) == ()


def test_other_data_to_evaluate_on_and_other_arguments_of_a_task_are_told() -> None:
    saved = config_toml(Config.model_validate({"data": {"args": {"max_terms": 2}}, "eval": {"data": {"size": 8}}}))
    config = Config.model_validate({"data": {"args": {"max_terms": 3}}, "eval": {"data": {"size": 9}}})
    assert changed_settings(saved, config) == ("data.args.max_terms was 2, is 3", "eval.data.size was 8, is 9")
