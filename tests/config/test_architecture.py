"""What cannot be trained is refused before anything starts, by the name of what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.architecture import check_tensor_parallel, read_architecture
from asyncrl.errors import ConfigError, ModelError

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 96,
    "intermediate_size": 120,
    "num_attention_heads": 6,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
QWEN3 = {**SIZES, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32}
QWEN2 = {**SIZES, "model_type": "qwen2", "num_key_value_heads": 2}
LLAMA = {**SIZES, "model_type": "llama"}


def write(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "gpt2"}, ['"gpt2"', "llama, qwen2, qwen3"]),
        ({}, ["model_type"]),
        ({**QWEN3, "hidden_act": "gelu"}, ['hidden_act = "gelu"', "supported: silu"]),
        ({**QWEN3, "attention_bias": True}, ["attention_bias"]),
        ({**LLAMA, "attention_bias": True, "mlp_bias": True}, ["attention_bias", "mlp_bias"]),
        ({**QWEN3, "use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2}, ["sliding-window"]),
        ({**QWEN3, "quantization_config": {"quant_method": "awq"}}, ["quantization_config"]),
        ({**QWEN3, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope scaling", '"yarn"']),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["rope scaling", '"linear"']),
        ({**QWEN3, "num_attention_heads": "six"}, ['num_attention_heads = "six" must be a positive integer']),
        ({**QWEN3, "num_key_value_heads": 4}, ["num_attention_heads = 6 is not a multiple of num_key_value_heads = 4"]),
        ({**QWEN3, "head_dim": 7}, ["head_dim = 7 is odd"]),
        ({**LLAMA, "hidden_size": 100}, ["hidden_size = 100 is not a multiple of num_attention_heads = 6"]),
        ({**LLAMA, "rope_theta": "big"}, ['rope_theta = "big" must be a positive number']),
        ({**LLAMA, "rope_parameters": [1]}, ["must be an object"]),
        ({**LLAMA, "partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({**QWEN3, "num_hidden_layers": 0}, ["num_hidden_layers = 0 must be a positive integer"]),
    ],
)
def test_a_feature_that_is_not_trained_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ModelError) as failure:
        read_architecture(write(tmp_path, config))
    assert all(part in str(failure.value) for part in [*named, str(tmp_path)])


def test_a_missing_or_broken_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_architecture(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_architecture(tmp_path)


def test_both_spellings_of_the_rotary_base_are_read(tmp_path: Path) -> None:
    old = read_architecture(write(tmp_path, {**QWEN3, "rope_theta": 5000.0}))
    new = read_architecture(
        write(tmp_path, {**QWEN3, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}})
    )
    assert old == new
    assert old.rope_theta == 5000.0
    assert (old.head_dim, old.num_kv_heads, old.qk_norm, old.qkv_bias) == (32, 2, True, False)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        QWEN2,
        QWEN3,
        {**LLAMA, "head_dim": 8, "tie_word_embeddings": True},
        {**QWEN2, "num_key_value_heads": None},
    ],
)
def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path: Path, config: dict[str, Any]) -> None:
    from transformers import AutoConfig

    got = read_architecture(write(tmp_path, config))
    hf = AutoConfig.from_pretrained(str(tmp_path))
    assert got.num_kv_heads == hf.num_key_value_heads
    assert got.head_dim == getattr(hf, "head_dim", hf.hidden_size // hf.num_attention_heads)
    assert (got.norm_eps, got.tied_embeddings) == (hf.rms_norm_eps, hf.tie_word_embeddings)
    assert got.rope_theta == hf.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (SIZES | {"model_type": "qwen2"}, "num_key_value_heads"),
        (SIZES | {"model_type": "llama", "vocab_size": None}, "vocab_size"),
    ],
)
def test_a_size_that_is_not_given_is_asked_for(tmp_path: Path, config: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelError, match=f"{field} = null must be a positive integer"):
        read_architecture(write(tmp_path, config))


def test_planning_a_run_imports_neither_torch_nor_transformers() -> None:
    modules = ", ".join(
        f"asyncrl.{name}"
        for name in (
            "config.architecture",
            "training.ranks.layout",
            "training.learner.packing",
            "training.learner.schedule",
        )
    )
    code = f"import sys, {modules}; print({{'torch', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_model_that_cannot_be_cut_names_what_is_in_the_way(tmp_path: Path) -> None:
    qwen = read_architecture(write(tmp_path, QWEN3))
    check_tensor_parallel(qwen, 2)
    with pytest.raises(ConfigError, match="does not divide the model's 6 attention heads"):
        check_tensor_parallel(qwen, 4)
    with pytest.raises(ConfigError, match="does not divide the model's 2 key-value heads"):
        check_tensor_parallel(qwen, 3)
