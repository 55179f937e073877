"""RMSNorm and attention in plain torch, for Megatron layers that are built without Transformer Engine.

They take packed sequences, which Megatron's own local modules refuse. They plug in through the layer spec; Megatron is
not patched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from asyncrl.training.learner.packing import attention_runs


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm with the constructor that Megatron's layer specs call."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Each tensor-parallel rank sees a part of the tokens: Megatron sums such gradients over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class PaddedRun:
    """Consecutive packed sequences [start, stop) as a padded batch of `count` rows of `longest` tokens."""

    start: int
    stop: int
    count: int
    longest: int
    rows: Tensor | None
    """int64 [stop - start]: place of each token in the flattened padded batch; None where nothing is padded."""

    def pad(self, packed: Tensor) -> Tensor:
        """[tokens, heads, dim] -> [count, heads, longest, dim] of this run; padding is zero."""
        part = packed[self.start : self.stop]
        if self.rows is not None:
            part = part.new_zeros(self.count * self.longest, *part.shape[1:]).index_copy(0, self.rows, part)
        return part.view(self.count, self.longest, *packed.shape[1:]).transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """[count, heads, longest, dim] -> [stop - start, heads * dim]."""
        flat = padded.transpose(1, 2).reshape(self.count * self.longest, -1)
        return flat if self.rows is None else flat.index_select(0, self.rows)


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a packed micro-batch, plus the padded runs that the torch attention computes."""

    runs: tuple[PaddedRun, ...] = ()


def packed_sequences(lengths: Sequence[int], device: torch.device) -> PackedSequences:
    """Describes sequences of `lengths` that lie one after the other."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    longest = max(lengths)
    runs = []
    for run in attention_runs(lengths):
        rows = None
        if run.tokens != run.longest * len(run.lengths):
            rows = torch.cat([torch.arange(n) + i * run.longest for i, n in enumerate(run.lengths)]).to(device)
        runs.append(PaddedRun(run.start, run.start + run.tokens, len(run.lengths), run.longest, rows))
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        runs=tuple(runs),
    )


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention over packed sequences: each padded run is one scaled_dot_product_attention.

    Padding stands at the end of its row, so causality hides it from every real token.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """query [tokens, heads, dim], key and value [tokens, kv heads, dim] -> [tokens, heads * dim]."""
        parts = [
            run.unpad(
                F.scaled_dot_product_attention(
                    run.pad(query), run.pad(key), run.pad(value), is_causal=True, scale=self.scale, enable_gqa=True
                )
            )
            for run in packed_seq_params.runs
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
