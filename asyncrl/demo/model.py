"""Makes the demo's initial policy: a Qwen3 of 1.2 M parameters that reads and writes single characters.

Invariants
- The files are the same, byte for byte, on every machine: weights come from a fixed seed, without torch.
- The directory appears whole or not at all: it is written beside its place and renamed into it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

# The model's shape and the seed of its weights.
HIDDEN = 192
INTERMEDIATE = 512
LAYERS = 3
HEADS = 6
KV_HEADS = 2
HEAD_DIM = 32
CONTEXT = 512
SEED = 20

SPECIAL = ("<pad>", "<eos>", "<unk>")
"""Special tokens, in the order of their ids."""
PAD_ID, EOS_ID, UNK_ID = range(3)
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
"""Characters with a token of their own; their ids follow those of `SPECIAL`."""
VOCABULARY = 128
"""Rows of the embedding: special tokens, characters, and unused rows up to a size that tensor parallelism divides."""


def build(path: Path, head_dim: int = HEAD_DIM) -> None:
    """Writes a Hugging Face model directory at `path`; replaces a directory that is already there.

    With another `head_dim` it is another model, for those who want a tiny one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        for name, content in _config_files(head_dim).items():
            (scratch / name).write_text(json.dumps(content, indent=2) + "\n")
        character_tokenizer().save(str(scratch / "tokenizer.json"))
        save_file(dict(_initial_weights(head_dim)), scratch / "model.safetensors", metadata={"format": "pt"})
        scratch.chmod(0o755)
        if path.exists():
            shutil.rmtree(path)
        os.rename(scratch, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def character_tokenizer() -> Tokenizer:
    """Returns a tokenizer with one token for each of `CHARACTERS`; any other character is `<unk>`."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def _config_files(head_dim: int) -> dict[str, dict[str, Any]]:
    ends = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    return {
        "config.json": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": head_dim,
            "max_position_embeddings": CONTEXT,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "dtype": "float32",
            **ends,
        },
        "generation_config.json": {"do_sample": True, "temperature": 1.0, **ends},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
        },
    }


def _initial_weights(head_dim: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yields named tensors [out, in] with normal values, scaled so that activations are of order one.

    Matrices that write into the residual stream are scaled down with depth.
    """
    rng = np.random.default_rng(SEED)
    damping = 1 / math.sqrt(2 * LAYERS)

    def matrix(rows: int, columns: int, std: float) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * std).astype(np.float32)

    def linear(rows: int, columns: int, scale: float = 1.0) -> NDArray[np.float32]:
        return matrix(rows, columns, scale / math.sqrt(columns))

    def ones(size: int) -> NDArray[np.float32]:
        return np.ones(size, np.float32)

    query, key = HEADS * head_dim, KV_HEADS * head_dim
    yield "model.embed_tokens.weight", matrix(VOCABULARY, HIDDEN, 1.0)
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", ones(HIDDEN)
        yield f"{layer}.self_attn.q_proj.weight", linear(query, HIDDEN)
        yield f"{layer}.self_attn.k_proj.weight", linear(key, HIDDEN)
        yield f"{layer}.self_attn.v_proj.weight", linear(key, HIDDEN)
        yield f"{layer}.self_attn.q_norm.weight", ones(head_dim)
        yield f"{layer}.self_attn.k_norm.weight", ones(head_dim)
        yield f"{layer}.self_attn.o_proj.weight", linear(HIDDEN, query, damping)
        yield f"{layer}.post_attention_layernorm.weight", ones(HIDDEN)
        yield f"{layer}.mlp.gate_proj.weight", linear(INTERMEDIATE, HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", linear(INTERMEDIATE, HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", linear(HIDDEN, INTERMEDIATE, damping)
    yield "model.norm.weight", ones(HIDDEN)
    yield "lm_head.weight", matrix(VOCABULARY, HIDDEN, 0.02)
