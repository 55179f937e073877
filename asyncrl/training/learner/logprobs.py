"""Log-probs and entropies from logits whose vocabulary is split over tensor-parallel ranks.

With z = logits / temperature and p = softmax z, in float32: log p(target) = z_target - log sum exp z, and the entropy
is H = log sum exp z - sum p z. One pass gives both. Of the size [tokens, vocabulary] there are the logits and their
gradient alone, both in the dtype of the model: probabilities are float32 and exist for a part of the tokens at a time,
once forward and once backward.
The entropy has a gradient only where it is asked for; otherwise nothing is computed or kept for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 20
"""Logits (4 MiB in float32) that are worked on at once, so that most stay in the cache."""
_GPU_CHUNK_ELEMENTS = 1 << 25
"""The same on a GPU (128 MiB): a kernel over so many takes much longer than its launch."""


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

        sums = logits.new_zeros((3, len(logits)), dtype=torch.float32)
        total, weighted, at_target = sums.unbind()
        for rows in _chunks(logits):
            scaled = _scaled(logits[rows, :real], peak[rows], temperature)
            if real:
                at_target[rows] = scaled.gather(-1, column[rows, None]).squeeze(-1)
            exponentials = scaled.exp()
            total[rows] = exponentials.sum(dim=-1)
            weighted[rows] = scaled.mul_(exponentials).sum(dim=-1)
        at_target.masked_fill_(elsewhere, 0.0)
        _reduce(sums, dist.ReduceOp.SUM, group)
        log_total = total.log()

        entropies = log_total - weighted / total  # of p ~ e^z: log sum e^z - sum p z
        kept = entropies if entropy_gradient else None
        ctx.save_for_backward(logits, peak, total, column, elsewhere, kept)
        ctx.temperature, ctx.real = temperature, real
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return at_target - log_total, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, peak, total, column, elsewhere, entropies = ctx.saved_tensors
        temperature, real = ctx.temperature, ctx.real
        scale = grads[0] / temperature
        at_target = scale.masked_fill(elsewhere, 0.0)
        entropy_scale = grads[1] / temperature if entropies is not None else None
        grad = torch.empty_like(logits)
        grad[:, real:] = 0.0
        for rows in _chunks(logits) if real else ():
            part = _scaled(logits[rows, :real], peak[rows], temperature).exp_().div_(total[rows, None])
            if entropy_scale is None:
                part.mul_(-scale[rows, None])
            else:
                of_entropy = torch.xlogy(part, part).add_(part * entropies[rows, None])  # p log p is 0 where p is
                part.mul_(-scale[rows, None]).sub_(of_entropy.mul_(entropy_scale[rows, None]))
            grad[rows, :real] = part.scatter_add_(-1, column[rows, None], at_target[rows, None])
        return grad, None, None, None, None, None


def _scaled(logits: Tensor, peak: Tensor, temperature: float) -> Tensor:
    """(logits - peak) / temperature, float32, in memory of its own."""
    return (logits.float() - peak[:, None]).div_(temperature)


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Rows that are worked on at once."""
    elements = _GPU_CHUNK_ELEMENTS if logits.is_cuda else _CHUNK_ELEMENTS
    step = max(1, elements // logits.shape[-1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


def _reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
