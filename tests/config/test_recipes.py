"""Every recipe of entrypoints/ is a configuration that a job would start with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config.problems import InvalidConfigError
from asyncrl.config.reading.loading import load_config
from tests.loops import ENTRYPOINTS

RECIPES = sorted((ENTRYPOINTS / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_accepted_where_its_models_are(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for model in ("models/smollm2", "runs/demo/export"):
        Path(model).mkdir(parents=True)
        Path(model, "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    config = load_config(["@", str(recipe)]).config
    assert config.eval.enabled or config.train.num_steps


def test_a_judge_that_is_not_there_yet_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        InvalidConfigError, match=r"models\.judge\.path: runs/demo/export is no Hugging Face model directory"
    ):
        load_config(["@", str(ENTRYPOINTS / "recipes" / "judge.toml")])
