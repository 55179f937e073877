"""The architecture of a decoder as its Hugging Face config.json declares it. Models that cannot be trained are refused.

Imports neither torch nor Megatron, so that the driver can refuse a model before anything starts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.errors import ConfigError, ModelError

SUPPORTED = ("llama", "qwen2", "qwen3")
"""Values of `model_type` that can be trained."""

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Llama 3 rope scaling that are fixed in Megatron; only `factor` is free."""


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
    """Longest sequence of the model, in tokens."""
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


def read_architecture(model: Path) -> Architecture:
    """Reads `config.json` of the Hugging Face directory `model`.

    It does without transformers, whose config classes take four seconds to import. Sizes must be given; other absent
    fields have the defaults of transformers.

    Raises:
        ModelError: there is no such directory or config, or it asks for a feature that the trainer does not have.
    """
    config = _Fields(model)
    model_type = _model_type(model, config)
    _refuse_features(model, config)
    theta, factor = _rope(config)
    hidden_size, heads = config.size("hidden_size"), config.size("num_attention_heads")
    qwen = model_type != "llama"  # whose families give absent fields odd defaults of their own
    kv_heads = config.size(
        "num_key_value_heads", None if qwen and "num_key_value_heads" not in config.fields else heads
    )
    if heads % kv_heads:
        config.refuse(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")
    if config.fields.get("head_dim") is None and hidden_size % heads:
        config.refuse(f"hidden_size = {hidden_size} is not a multiple of num_attention_heads = {heads}; give head_dim")
    head_dim = config.size("head_dim", None if model_type == "qwen3" else hidden_size // heads)
    if head_dim % 2:
        config.refuse(f"head_dim = {head_dim} is odd; rotary positions turn pairs")
    return Architecture(
        model_type=model_type,
        num_layers=config.size("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=config.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.size("vocab_size"),
        max_positions=config.size("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_llama3_factor=factor,
        tied_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
    )


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


class _Fields:
    """The fields of a config.json, read with their types checked."""

    def __init__(self, model: Path) -> None:
        self.path = model / "config.json"
        if not model.is_dir():
            raise ModelError(
                f"model directory {model} does not exist; set model.path to a local Hugging Face directory"
            )
        if not self.path.is_file():
            raise ModelError(f"{model} has no config.json; model.path must be a Hugging Face directory")
        try:
            fields = json.loads(self.path.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"{self.path} is not valid JSON: {error}") from None
        if not isinstance(fields, dict):
            self.refuse("it must hold a JSON object")
        self.fields: dict[str, Any] = fields

    def refuse(self, reason: str) -> NoReturn:
        raise ModelError(f"{self.path}: {reason}")

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer, or `default` where it is absent or null. Without a default it is refused then."""
        value = self.fields.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.refuse(f"{name} = {json.dumps(value)} must be a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        return _positive(self, name, self.fields.get(name, default))

    def flag(self, name: str) -> bool:
        """True or false; absent is false."""
        value = self.fields.get(name, False)
        if not isinstance(value, bool):
            self.refuse(f"{name} = {json.dumps(value)} must be true or false")
        return value


def _model_type(model: Path, config: _Fields) -> str:
    model_type = str(config.fields.get("model_type"))
    if model_type not in SUPPORTED:
        raise ModelError(
            f'{model}: model_type "{model_type}" cannot be trained; supported: {", ".join(SUPPORTED)} (model.path)'
        )
    return model_type


def _positive(config: _Fields, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        config.refuse(f"{name} = {json.dumps(value)} must be a positive number")
    return float(value)


def _refuse_features(model: Path, config: _Fields) -> None:
    fields = config.fields
    activation = fields.get("hidden_act", "silu")
    windowed = set(fields.get("layer_types") or ()) - {"full_attention"}
    unsupported = [
        feature
        for feature, present in (
            (f"hidden_act = {json.dumps(activation)} (supported: silu)", activation != "silu"),
            # Qwen2 has no such field: its biases are part of the family
            ("attention_bias = true", fields["model_type"] != "qwen2" and config.flag("attention_bias")),
            ("mlp_bias = true", config.flag("mlp_bias")),
            ("sliding-window attention", config.flag("use_sliding_window") or bool(windowed)),
            ("quantised weights (quantization_config)", fields.get("quantization_config") is not None),
        )
        if present
    ]
    if unsupported:
        raise ModelError(
            f"{model}: the trainer does not support {'; '.join(unsupported)} of this {fields['model_type']} model; "
            f"supported: {', '.join(SUPPORTED)} with full attention, SiLU, no such biases and unquantised weights"
        )


def _rope(config: _Fields) -> tuple[float, float | None]:
    """Base and Llama 3 factor of the rotary embedding, in the spelling of transformers 4 or 5."""
    rope = config.fields.get("rope_parameters") or config.fields.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        config.refuse("rope_parameters (or rope_scaling) must be an object")
    theta = _positive(config, "rope_theta", rope.get("rope_theta", config.fields.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    for fields in (rope, config.fields):
        if fields.get("partial_rotary_factor", 1.0) != 1.0:
            config.refuse("partial_rotary_factor is not supported; rotary positions must cover the whole head")
    if kind == "default":
        return theta, None
    if kind == "llama3" and all(rope.get(key) == value for key, value in _LLAMA3_ROPE.items()):
        return theta, _positive(config, "factor of the rope scaling", rope.get("factor"))
    config.refuse(
        f"rope scaling {json.dumps(rope)} is not supported; supported: none, and llama3 with "
        + ", ".join(f"{key} = {value:g}" for key, value in _LLAMA3_ROPE.items())
    )
