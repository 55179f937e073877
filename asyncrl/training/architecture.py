"""What a Hugging Face config.json says about a decoder, in the trainer's own words, and the refusal of what it cannot
train.

Imports neither torch nor Megatron, so that the driver can refuse a model before anything starts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, ModelError

SUPPORTED = ("llama", "qwen2", "qwen3")
"""Values of `model_type` that can be trained."""

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of Llama 3 rope scaling that Megatron builds in; only `factor` is free."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shape of a dense decoder with RMSNorm, rotary positions, grouped-query attention and a SiLU-gated MLP."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding in the checkpoint, without padding."""
    max_positions: int
    """Longest sequence that the model was made for, in tokens."""
    norm_eps: float
    rope_theta: float
    rope_llama3_factor: float | None
    """Factor of Llama 3 rope scaling; None without scaling."""
    tied_embeddings: bool
    """Input and output embedding are one tensor."""
    qkv_bias: bool
    """Query, key and value projections have a bias (Qwen2)."""
    qk_norm: bool
    """Queries and keys are normalised per head (Qwen3)."""


def check_model_type(model: Path) -> str:
    """The `model_type` of the Hugging Face directory `model`, at no more cost than reading its config.json.

    Raises:
        ModelError: there is no such directory or config, or models of this type cannot be trained.
    """
    model_type = str(_read_json(model).get("model_type"))
    if model_type not in SUPPORTED:
        raise ModelError(
            f'{model}: model_type "{model_type}" cannot be trained; supported: {", ".join(SUPPORTED)} (model.path)'
        )
    return model_type


def read_architecture(model: Path) -> Architecture:
    """Reads `config.json` of the Hugging Face directory `model`.

    Raises:
        ModelError: there is no such directory or config, or it asks for something that the trainer does not do.
    """
    model_type = check_model_type(model)
    config = _read_json(model)

    # The config class fills in what a config.json leaves out; its import takes a second, hence only here.
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        hf = AutoConfig.from_pretrained(str(model))
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise ModelError(f"{model / 'config.json'} is not a valid {model_type} config: {error}") from None
    _refuse_features(model, config, hf)
    theta, factor = _rope(model, hf)
    heads = int(hf.num_attention_heads)
    architecture = Architecture(
        model_type=model_type,
        num_layers=int(hf.num_hidden_layers),
        hidden_size=int(hf.hidden_size),
        ffn_hidden_size=int(hf.intermediate_size),
        num_heads=heads,
        num_kv_heads=int(hf.num_key_value_heads or heads),
        head_dim=int(getattr(hf, "head_dim", None) or hf.hidden_size // heads),
        vocab_size=int(hf.vocab_size),
        max_positions=int(hf.max_position_embeddings),
        norm_eps=float(hf.rms_norm_eps),
        rope_theta=theta,
        rope_llama3_factor=factor,
        tied_embeddings=bool(hf.tie_word_embeddings),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
    )
    _check_sizes(model, architecture)
    return architecture


def check_tensor_parallel(architecture: Architecture, tensor_parallel: int) -> None:
    """Raises ConfigError where the model cannot be cut into `tensor_parallel` parts."""
    for what, size in (
        ("attention heads", architecture.num_heads),
        ("key-value heads", architecture.num_kv_heads),
        ("MLP columns", architecture.ffn_hidden_size),
    ):
        if size % tensor_parallel:
            raise ConfigError(
                f"train.tensor_parallel = {tensor_parallel} does not divide the model's {size} {what}; choose a divisor"
            )


def _read_json(model: Path) -> dict[str, Any]:
    path = model / "config.json"
    if not model.is_dir():
        raise ModelError(f"model directory {model} does not exist; set model.path to a local Hugging Face directory")
    if not path.is_file():
        raise ModelError(f"{model} has no config.json; model.path must be a Hugging Face directory")
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return config


def _refuse_features(model: Path, raw: dict[str, Any], hf: Any) -> None:
    kinds = set(getattr(hf, "layer_types", None) or ())
    unsupported = [
        feature
        for feature, present in (
            (f'hidden_act = "{hf.hidden_act}" (supported: silu)', hf.hidden_act != "silu"),
            ("attention_bias = true", bool(getattr(hf, "attention_bias", False))),
            ("mlp_bias = true", bool(getattr(hf, "mlp_bias", False))),
            (
                "sliding-window attention (use_sliding_window = true)",
                bool(getattr(hf, "use_sliding_window", False)) or bool(kinds - {"full_attention"}),
            ),
            ("quantised weights (quantization_config)", raw.get("quantization_config") is not None),
        )
        if present
    ]
    if unsupported:
        raise ModelError(
            f"{model}: the trainer does not support {'; '.join(unsupported)} of this {raw['model_type']} model; "
            f"supported: {', '.join(SUPPORTED)} with full attention, SiLU, no such biases and unquantised weights"
        )


def _check_sizes(model: Path, architecture: Architecture) -> None:
    for field in fields(architecture):
        value = getattr(architecture, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            raise ModelError(f"{model / 'config.json'}: {field.name} = {value} must be positive")
    if architecture.num_heads % architecture.num_kv_heads:
        raise ModelError(
            f"{model / 'config.json'}: num_attention_heads = {architecture.num_heads} is not a multiple of "
            f"num_key_value_heads = {architecture.num_kv_heads}"
        )


def _rope(model: Path, hf: Any) -> tuple[float, float | None]:
    """Base and Llama 3 factor of the rotary embedding; both spellings, of transformers 4 and 5."""
    rope = dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})
    theta = float(rope.get("rope_theta") or getattr(hf, "rope_theta", None) or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if float(rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(f"{model}: partial_rotary_factor is not supported; rotary positions must cover the whole head")
    if kind == "default":
        return theta, None
    if kind == "llama3" and all(rope.get(key) == value for key, value in _LLAMA3_ROPE.items()):
        return theta, float(rope["factor"])
    raise ModelError(
        f'{model}: rope scaling "{kind}" with {rope} is not supported; supported: none, and llama3 with '
        + ", ".join(f"{key} = {value:g}" for key, value in _LLAMA3_ROPE.items())
    )
