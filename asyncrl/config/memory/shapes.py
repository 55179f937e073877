"""Sizes that follow from a model's shape: its parameters on one rank, and the KV of one token. Pure.

A rank of a tensor-parallel group holds its part of every matrix and whole norms, in the trainer (Megatron) as in an
engine (SGLang).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.config.architecture import Architecture
from asyncrl.config.layout import DType

BYTES: Mapping[DType, int] = {"float32": 4, "bfloat16": 2}
"""Of one number."""


@dataclass(frozen=True, slots=True)
class RankShape:
    """A model as one of `parts` tensor-parallel ranks holds it. Widths are in numbers for each token."""

    model: Architecture
    parts: int = 1

    @property
    def query(self) -> int:
        """All query heads of the rank."""
        return self.model.num_heads * self.model.head_dim // self.parts

    @property
    def key(self) -> int:
        """All key heads of the rank, and as much again for the value heads. An engine repeats heads that are fewer than
        its ranks."""
        return max(1, self.model.num_kv_heads // self.parts) * self.model.head_dim

    @property
    def heads(self) -> int:
        """Query and key heads."""
        return (self.query + self.key) // self.model.head_dim

    @property
    def ffn(self) -> int:
        """Columns of the feed-forward network."""
        return self.model.ffn_hidden_size // self.parts

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding, padded so that every rank has as many."""
        return -(-self.model.vocab_size // self.parts)

    @property
    def parameters(self) -> int:
        """Numbers in all parameters of the rank."""
        model, width = self.model, self.model.hidden_size
        qkv = self.query + 2 * self.key
        layer = qkv * width + self.query * width + 3 * self.ffn * width + 2 * width
        layer += qkv if model.qkv_bias else 0
        layer += 2 * model.head_dim if model.qk_norm else 0
        embeddings = (1 if model.tied_embeddings else 2) * self.vocabulary * width
        return model.num_layers * layer + embeddings + width

    @property
    def largest_parameter(self) -> int:
        """Numbers in the largest parameter of the rank: the embedding, or the two upper projections of a layer."""
        return max(self.vocabulary, 2 * self.ffn) * self.model.hidden_size

    def kv_bytes(self, dtype: DType) -> int:
        """KV of one token, on one rank."""
        return 2 * self.model.num_layers * self.key * BYTES[dtype]
