"""Tiny models of every supported family, as Hugging Face directories with weights that make distributions far from
uniform."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import asyncrl.training.megatron.backend  # noqa: F401  before any fork, so that ranks inherit the import

VOCAB_SIZE = 101
"""Odd, so that tensor parallelism must pad it."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,  # with heads of 12 all three bands of the scaling are met
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, Any] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=False)),
    "qwen3-tied": lambda: Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=True)),
    "qwen2-tied": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHAPE, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE, tie_word_embeddings=False)),
    "llama3-rope": lambda: LlamaForCausalLM(
        LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3_ROPE, tie_word_embeddings=True)
    ),
}


def write_model(path: Path, kind: str, *, dtype: torch.dtype = torch.float32, **save_arguments: Any) -> Path:
    torch.manual_seed(0)
    model = MODELS[kind]()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.15)
    model.to(dtype).save_pretrained(path, **save_arguments)
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """model_directory(kind) -> Path, built once."""
    root = tmp_path_factory.mktemp("models")

    def directory(kind: str) -> Path:
        path = root / kind
        return path if path.exists() else write_model(path, kind)

    return directory


def reference(path: Path) -> Any:
    """The same model in transformers, float32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
