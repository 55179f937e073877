"""What one trainer rank keeps of a packed micro-batch between forward and backward pass. Pure; bytes for each token.

The formula names the tensors that autograd saves in Megatron's local layers with the norm and attention of
`training/megatron/modules.py`. docs/gpu.md compares it with what torch keeps on a CPU, and says what was assumed for
CUDA: a fused RMSNorm keeps its input, the composite one of a CPU keeps two float32 tensors.

Invariants
- Every number grows with each size of the model, and shrinks with more tensor-parallel ranks.
- With tensor parallelism the sequence is cut too: norms and residual stream have a part of the tokens on each rank.
- A recomputed part is kept nowhere but in the one layer whose backward pass runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from asyncrl.config.layout import Device, DType
from asyncrl.config.memory.shapes import BYTES, RankShape

Recompute = Literal["none", "mlp", "full"]

_FFN_KEPT = 5
"""Tensors of FFN width: gate and up as one, the activation, up plus Megatron's offset, and their product."""
_FLOAT32 = 4
_CHUNKS: Mapping[DType, int] = {"float32": 1, "bfloat16": 2}
"""Temporaries of the log-softmax in float32, beside logits and gradient (`training/learner/logprobs.py`) ..."""
_CHUNK_LOGITS: Mapping[Device, int] = {"cpu": 1 << 20, "cuda": 1 << 25}
"""... each of at most so many logits."""


@dataclass(frozen=True, slots=True)
class TokenActivations:
    """Bytes for each token of a micro-batch."""

    kept: int
    """Of all layers, from the forward pass to the backward pass."""
    again: int
    """Of one layer, while its backward pass runs: what is computed again, and gradients of its widest tensors."""
    logits: int
    """Logits, and as much again for their gradient. Every token counts as sampled."""
    softmax: int
    """Temporaries of the log-softmax, as long as all logits are computed at once."""
    most_softmax: int
    """Most that these take, of any number of tokens, in bytes."""

    def peak(self, tokens: int) -> tuple[int, int]:
        """(activations, logits) of `tokens` tokens where they take most memory together."""
        logits = tokens * self.logits + min(tokens * self.softmax, self.most_softmax)
        return tokens * self.kept + max(0, tokens * self.again - logits), logits


def token_activations(shape: RankShape, *, dtype: DType, device: Device, recompute: Recompute) -> TokenActivations:
    """What a token costs on a rank of `shape.parts` tensor-parallel ranks."""
    number, width, parts = BYTES[dtype], shape.model.hidden_size, shape.parts
    fused = device == "cuda"

    def norm(numbers: int, rows: int, *, own_input: bool = True) -> int:
        """A norm of `numbers` in `rows` rows. Its input may belong to a tensor that is kept anyway."""
        if fused:
            return numbers * number * own_input + rows * _FLOAT32
        copies = 1 if dtype == "float32" and not own_input else 2
        return copies * numbers * _FLOAT32 + rows * _FLOAT32

    block_norm = -(-(norm(width, 1) + width * number) // parts)  # with its output, the input of a projection
    attention = number * (2 * shape.query + (shape.query + 2 * shape.key) + shape.key)  # rotated q, output, qkv, k
    attention += 4 * shape.model.head_dim * number + shape.query // shape.model.head_dim * _FLOAT32  # rope, log-sums
    if shape.model.qk_norm:
        attention += norm(shape.query, shape.query // shape.model.head_dim)
        attention += norm(shape.key, shape.key // shape.model.head_dim, own_input=False)
    ffn = _FFN_KEPT * shape.ffn * number
    layer = 2 * block_norm + attention + ffn
    kept = {"none": layer, "mlp": layer - ffn, "full": -(-width * number // parts)}[recompute]
    gradients = 2 * shape.ffn * number
    ends = -(-norm(width, 1) // parts) + width * number  # the last norm, and the output layer's input of all tokens
    ends += shape.model.head_dim * _FLOAT32  # the angles of the rotary embedding, which all layers share
    return TokenActivations(
        kept=shape.model.num_layers * kept + ends,
        again={"none": 0, "mlp": ffn, "full": layer}[recompute] + gradients,
        logits=2 * shape.vocabulary * number,
        softmax=_CHUNKS[dtype] * _FLOAT32 * shape.vocabulary,
        most_softmax=_CHUNKS[dtype] * _FLOAT32 * _CHUNK_LOGITS[device],
    )
