"""`debug.train_only`: whole jobs without engines, on batches that somebody saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.saved_batch import save_batch
from tests.system.jobs import run, write_recipe
from tests.training.batches import make_batch

pytestmark = [pytest.mark.system, pytest.mark.timeout(450)]

LENGTHS = [(5, 9), (3, 12), (7, 2), (1, 12), (8, 9), (2, 2), (10, 4), (6, 6)]


def replay(recipe: Path, name: str, rollouts: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    directory = recipe.parent / name
    train_only = ("--debug.train_only", "--debug.load_rollouts", str(rollouts), "--run.dir", str(directory))
    code, output, _ = run(recipe, *train_only, *options, timeout_s=120)
    assert code == 0, output
    return [json.loads(line) for line in (directory / "comparison.jsonl").read_text().splitlines()], output


def test_the_trainer_alone_repeats_a_run_to_the_last_bit_and_says_where_another_one_parts(
    tmp_path: Path, tiny_models: tuple[Path, Path]
) -> None:
    recipe = write_recipe(tmp_path, tiny_models[0], steps=9)
    for rollout_id in range(3):
        batch = make_batch(LENGTHS, groups=[0, 0, 1, 1, 2, 2, 3, 3], vocab_size=64, rollout_id=rollout_id)
        save_batch(batch, tmp_path / "rollouts", {})
    lines, output = replay(recipe, "recorded", tmp_path / "rollouts")
    assert [(line["step"], line["same"]) for line in lines] == [(1, None), (2, None), (3, None)]
    assert "stopped on request after a finished step" in output, "the loop ends with the last batch"

    shutil.move(tmp_path / "rollouts", tmp_path / "recorded")
    lines, output = replay(recipe, "again", tmp_path / "recorded" / "rollouts")
    assert [line["same"] for line in lines] == [True, True, True]
    assert "3 steps replayed, all as recorded within 0.0001 (largest relative difference 0.0e+00)" in output

    lines, output = replay(recipe, "other", tmp_path / "recorded" / "rollouts", "--train.grad_clip", "0.01")
    assert [line["same"] for line in lines] == [True, False, False], "the first loss comes before the first update"
    assert "2 of 3 replayed steps differ, the first is step 2" in output
