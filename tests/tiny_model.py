"""A small random Qwen3 that engines, trainers and transformers load alike; made without a network in a second."""

from __future__ import annotations

from pathlib import Path

from tests.tiny_policy import write_policy

VOCABULARY = 64
CONTEXT = 512
HIDDEN = 64
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
INTERMEDIATE = 128
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "max_window_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
}


def write_tiny_qwen3(path: Path, seed: int = 0) -> Path:
    """Writes config, character tokenizer and float32 weights; other seeds make other weights of the same shape.

    The weights are large enough that greedy answers differ between seeds and sampling has an entropy over 0.5 nat.
    """
    import torch
    from safetensors.torch import save_file

    write_policy(path, vocab_size=VOCABULARY, context_length=CONTEXT, config=CONFIG)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 0.12) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    tensors = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal(VOCABULARY, HIDDEN, std=0.25),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.self_attn.q_norm.weight": torch.ones(HEAD_DIM),
            f"{prefix}.self_attn.k_norm.weight": torch.ones(HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE),
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
