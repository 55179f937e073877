"""Every recipe of entrypoints/ is a configuration that a job would start with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config.machine import Machine
from asyncrl.config.problems import InvalidConfigError
from asyncrl.config.reading.loading import load_config, parse_command_line, resolve
from asyncrl.config.reading.report import dry_run_report
from asyncrl.driver import check_start
from tests.loops import ENTRYPOINTS
from tests.tiny_policy import QWEN_THINKING, write_policy

RECIPES = sorted((ENTRYPOINTS / "recipes").glob("*.toml"))
ON_GPUS = {
    # recipe, machine, trainer ranks: the engines' GPUs, and how weights reach them
    ("qwen3-0.6b", "1x40GB", 1): ([0], "tensor"),
    ("qwen3-8b", "8x80GB", 4): ([4, 5, 6, 7], "broadcast"),
    ("qwen3-8b-colocated", "8x80GB", 8): ([0, 1, 2, 3, 4, 5, 6, 7], "tensor"),
    ("qwen3-8b-colocated", "4x80GB", 4): ([0, 1, 2, 3], "tensor"),
}
QWEN3 = {
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""What config.json of the released models says, beside what all of them say."""


def write_qwen3(recipe: str) -> None:
    """The model of a recipe without its weights."""
    name = recipe.removesuffix("-colocated")
    path = Path("models") / name.replace("qwen", "Qwen").replace("b", "B")
    path.mkdir(parents=True)
    write_policy(path, chat_template=QWEN_THINKING)
    common = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "hidden_act": "silu",
        "tie_word_embeddings": name == "qwen3-0.6b",
    }
    (path / "config.json").write_text(json.dumps(common | QWEN3[name]))


@pytest.mark.parametrize(("recipe", "machine", "ranks"), ON_GPUS)
def test_a_recipe_for_gpus_fits_the_machine_that_it_names(
    recipe: str, machine: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_qwen3(recipe)
    file = ENTRYPOINTS / "recipes" / f"{recipe}.toml"
    assert f"--as {machine}" in file.read_text()
    argv = ["@", str(file), "--dry-run", "--as", machine, "--nproc-per-node", str(ranks)]
    loaded = resolve(parse_command_line(argv), Machine(), dry_run=True)
    assert loaded.memory is not None and loaded.memory.worst is None
    check_start(loaded)
    layout, (of_engines, transport) = loaded.layout, ON_GPUS[recipe, machine, ranks]
    assert (layout.device, layout.dtype, len(layout.trainers)) == ("cuda", "bfloat16", ranks)
    assert [gpu for engine in layout.engines for gpu in engine.gpus] == of_engines
    assert layout.transports == {transport} and layout.unused_gpus == () and loaded.warnings == ()
    assert loaded.memory is not None and loaded.memory.worst is None and loaded.memory.longest is not None
    assert loaded.config.model.context_length is not None
    assert loaded.memory.longest >= loaded.config.model.context_length
    assert all(tokens > 100_000 for tokens in loaded.memory.kv_tokens.values())
    assert f"planned for {machine}" in dry_run_report(loaded)


@pytest.mark.parametrize(
    "recipe", [recipe for recipe in RECIPES if "qwen3" not in recipe.name], ids=lambda recipe: recipe.stem
)
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


def test_every_recipe_is_tried_here() -> None:
    assert {recipe.stem for recipe in RECIPES if "qwen3" in recipe.name} == {recipe for recipe, _, _ in ON_GPUS}


def test_a_judge_that_is_not_there_yet_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        InvalidConfigError, match=r"models\.judge\.path: runs/demo/export is no Hugging Face model directory"
    ):
        load_config(["@", str(ENTRYPOINTS / "recipes" / "judge.toml")])
