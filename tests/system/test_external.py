"""Whole jobs on an engine that was there before them and serves the next one after them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.jobs import ROOT, refused, run, write_recipe

pytestmark = [pytest.mark.system, pytest.mark.timeout(450)]


def test_a_loop_of_ones_own_runs_over_the_public_components(
    tmp_path: Path, tiny_models: tuple[Path, Path], shared_engine: str
) -> None:
    recipe = write_recipe(tmp_path, tiny_models[0], steps=2, engine_url=shared_engine)
    code, output, started = run(recipe, timeout_s=400, entry=ROOT / "entrypoints" / "own_loop.py")
    assert code == 0, output
    assert json.loads((started.run_dir / "summary.json").read_text())["steps"] == 2


def test_a_reward_that_fails_on_the_first_batch_is_shown_with_what_it_raised(
    tmp_path: Path, tiny_models: tuple[Path, Path], shared_engine: str
) -> None:
    recipe = write_recipe(tmp_path, tiny_models[0], engine_url=shared_engine)
    (tmp_path / "my_rewards.py").write_text("def broken(sample, prompt):\n    return 1 / 0\n")
    message = refused(
        recipe,
        *("--reward.function", "my_rewards:broken", "--reward.args", "{}"),
        timeout_s=400,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert "my_rewards:broken failed on 9 of the first 16 samples" in message and "division by zero" in message
