"""Log-probs and entropies from logits whose vocabulary is split over tensor-parallel ranks.

With z = logits / temperature and p = softmax z, in float32: log p(target) = z_target - log sum exp z, and the entropy
is H = log sum exp z - sum p z. One pass gives both, and keeps one [tokens, vocabulary] tensor for the backward pass.
The entropy has a gradient only where it is asked for; otherwise nothing is computed or kept for it.
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
    entropy_gradient: bool = False,
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

        entropy_gradient: the entropies are differentiable too.

    Returns:
        Log-probs, float32 [tokens] with gradient, and entropies, float32 [tokens]; the same on every rank of `group`.
    """
    logprobs, entropies = _TokenLogprobs.apply(logits, targets, temperature, vocab_size, group, entropy_gradient)
    return logprobs, entropies


class _TokenLogprobs(torch.autograd.Function):
    """d log p(target) / d z = onehot(target) - p, and d H / d z = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        entropy_gradient: bool,
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

        entropies = log_total - weighted / total  # of p ~ e^z: log sum e^z - sum p z
        kept = entropies if entropy_gradient else None
        ctx.save_for_backward(probabilities.div_(total[:, None]), column, elsewhere, kept)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return at_target - log_total, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        probabilities, column, elsewhere, entropies = ctx.saved_tensors
        scale = grads[0] / ctx.temperature
        if entropies is not None:
            _add_entropy_gradient(probabilities, entropies, scale, grads[1] / ctx.temperature)
            grad = probabilities
        else:
            grad = probabilities.mul_(-scale[:, None])  # in place: no graph is run backward twice here
        grad.scatter_add_(-1, column[:, None], scale.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None, None, None, None


def _add_entropy_gradient(probabilities: Tensor, entropies: Tensor, scale: Tensor, entropy_scale: Tensor) -> None:
    """Replaces each p by -p * scale - p (log p + H) * entropy_scale, a chunk of rows at a time."""
    step = max(1, _CHUNK_ELEMENTS // probabilities.shape[-1])
    for start in range(0, len(probabilities), step):
        rows = slice(start, start + step)
        part = probabilities[rows]
        of_entropy = torch.xlogy(part, part).add_(part * entropies[rows, None])  # p log p is 0 where p is
        part.mul_(-scale[rows, None]).sub_(of_entropy.mul_(entropy_scale[rows, None]))


def _reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
