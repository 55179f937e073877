"""RMSNorm and attention in plain torch, for Megatron layers that are built without Transformer Engine.

They take packed sequences, which Megatron's own local modules refuse. They plug in through the layer spec; Megatron is
not patched.

Invariant: no layer reads a number back from the device. What a layer must know on the host is computed there, once for
each micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from asyncrl.training.learner.collate import send
from asyncrl.training.learner.packing import attention_runs
from asyncrl.training.megatron.kernels import Attention


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
    """Megatron's description of a packed micro-batch, plus the runs of an attention that pads.

    `cu_seqlens_q` and `cu_seqlens_kv` say on the device where sequences end, for kernels. Megatron's rotary embedding
    reads `cu_seqlens_q_padded` and `cu_seqlens_kv_padded` on the host, in each layer, unless it is fused. So these lie
    there and name one stretch of all tokens, since the model gives it the angles of each token (`PolicyModel`).
    """

    runs: tuple[PaddedRun, ...] = ()
    """Empty where no attention pads."""


def packed_sequences(
    lengths: Sequence[int], device: torch.device, attention: Attention, *, fused_rope: bool = False
) -> PackedSequences:
    """Describes sequences of `lengths` that lie one after the other, as attention and rotary embedding need them."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    stretch = None if fused_rope else ends[[0, -1]]
    ends, longest = send(ends, device), max(lengths)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=stretch,
        cu_seqlens_kv_padded=stretch,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        runs=_padded_runs(lengths, device) if attention is Attention.PADDED else (),
    )


def _padded_runs(lengths: Sequence[int], device: torch.device) -> tuple[PaddedRun, ...]:
    runs = []
    for run in attention_runs(lengths):
        rows = None
        if run.tokens != run.longest * len(run.lengths):
            places = torch.cat([torch.arange(n) + i * run.longest for i, n in enumerate(run.lengths)])
            rows = send(places, device)
        runs.append(PaddedRun(run.start, run.start + run.tokens, len(run.lengths), run.longest, rows))
    return tuple(runs)


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention over packed sequences: a flash attention, or scaled_dot_product_attention of each padded run.

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
        if not packed_seq_params.runs:
            return self._variable_length(query, key, value, packed_seq_params)
        parts = [
            run.unpad(
                F.scaled_dot_product_attention(
                    run.pad(query), run.pad(key), run.pad(value), is_causal=True, scale=self.scale, enable_gqa=True
                )
            )
            for run in packed_seq_params.runs
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _variable_length(self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences) -> Tensor:
        ends, longest = sequences.cu_seqlens_q, sequences.max_seqlen_q
        attended = varlen_attn(
            query,
            key,
            value,
            ends,
            ends,
            longest,
            longest,
            scale=self.scale,
            window_size=(-1, 0),  # every token before, none after: causal
            enable_gqa=True,
        )
        assert isinstance(attended, Tensor)  # alone, since no further output is asked for
        return attended.flatten(1)


class BFloat16Module(Float16Module):  # type: ignore[misc]
    """A bfloat16 model whose logits stay bfloat16: `token_logprobs` makes a part of them float32 at a time."""

    def forward(self, *inputs: Any) -> Tensor:
        """As the model that it wraps."""
        logits: Tensor = super().forward(*inputs, fp32_output=False)
        return logits
