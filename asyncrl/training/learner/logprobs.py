"""Log-probs and entropies from logits whose vocabulary is split over tensor-parallel ranks.

log p(target) = z_target - log sum exp z with z = logits / temperature, in float32. One pass gives the log-prob
(differentiable) and the entropy (a diagnostic, without gradient), and keeps one [tokens, vocabulary] tensor for the
backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 22
"""Logits (16 MiB in float32) that are worked on at once, so that only the result is as large as all of them."""


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target token and entropy of each distribution, in nats.

    Args:
        logits: [tokens, vocabulary / ranks of `group`], any float dtype; rank r holds columns from r * width. Never
            modified.
        targets: int64 [tokens], ids in the whole vocabulary.
        temperature: logits are divided by it, as the sampler does.
        vocab_size: columns that are real; those past it (padding for tensor parallelism) have probability 0 and no
            gradient.
        group: the tensor-parallel ranks; None where one rank holds all columns.

    Returns:
        float32 [tokens] with gradient, float32 [tokens] without; the same on every rank of `group`.
    """
    logprobs, entropies = _TokenLogprobs.apply(logits, targets, temperature, vocab_size, group)
    return logprobs, entropies


class _TokenLogprobs(torch.autograd.Function):
    """d log p(target) / d logits = (onehot(target) - p) / temperature."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, vocab_size: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        width = logits.shape[-1]
        first = width * dist.get_rank(group) if group is not None else 0
        real = max(0, min(width, vocab_size - first))
        peak = logits[:, :real].amax(dim=-1).float() if real else logits.new_full(logits.shape[:1], -torch.inf).float()
        _reduce(peak, dist.ReduceOp.MAX, group)
        column = targets - first
        elsewhere = (column < 0) | (column >= real)
        column = column.masked_fill(elsewhere, 0)

        probabilities = logits.new_zeros(logits.shape, dtype=torch.float32)
        sums = logits.new_zeros((3, len(logits)), dtype=torch.float32)
        total, weighted, at_target = sums.unbind()
        step = max(1, _CHUNK_ELEMENTS // width)
        for start in range(0, len(logits), step):
            rows = slice(start, start + step)
            scaled = (logits[rows, :real].float() - peak[rows, None]) / temperature
            if real:
                at_target[rows] = scaled.gather(-1, column[rows, None]).squeeze(-1)
            exponentials = torch.exp(scaled, out=probabilities[rows, :real])
            total[rows] = exponentials.sum(dim=-1)
            weighted[rows] = scaled.mul_(exponentials).sum(dim=-1)
        at_target.masked_fill_(elsewhere, 0.0)
        _reduce(sums, dist.ReduceOp.SUM, group)
        log_total = total.log()

        ctx.save_for_backward(probabilities.div_(total[:, None]), column, elsewhere)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        entropies = log_total - weighted / total  # of p ~ e^z: log sum e^z - sum p z
        ctx.mark_non_differentiable(entropies)
        return at_target - log_total, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, column, elsewhere = ctx.saved_tensors
        scale = grads[0] / ctx.temperature
        grad = probabilities.mul_(-scale[:, None])  # in place: no graph is run backward twice here
        grad.scatter_add_(-1, column[:, None], scale.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None, None, None


def _reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
