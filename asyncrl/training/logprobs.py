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
        scaled = logits.float() / temperature
        scaled[:, real:] = -torch.inf

        peak = scaled.amax(dim=-1)
        _reduce(peak, dist.ReduceOp.MAX, group)
        scaled -= peak[:, None]
        column = targets - first
        elsewhere = (column < 0) | (column >= real)
        column = column.masked_fill(elsewhere, 0)
        at_target = scaled.gather(-1, column[:, None]).squeeze(-1).masked_fill(elsewhere, 0.0)
        exponentials = scaled.exp()
        # sum of e^z * z for the entropy; a padded column would be 0 * -inf
        weighted = (exponentials[:, :real] * scaled[:, :real]).sum(dim=-1)
        sums = torch.stack((exponentials.sum(dim=-1), weighted, at_target))
        _reduce(sums, dist.ReduceOp.SUM, group)
        total, weighted, at_target = sums.unbind()
        log_total = total.log()

        ctx.save_for_backward(exponentials.div_(total[:, None]), column, elsewhere)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        entropies = log_total - weighted / total
        ctx.mark_non_differentiable(entropies)
        return at_target - log_total, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, column, elsewhere = ctx.saved_tensors
        scale = grads[0] / ctx.temperature
        grad = probabilities * -scale[:, None]
        grad.scatter_add_(-1, column[:, None], scale.masked_fill(elsewhere, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None, None, None


def _reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
