"""Losses on flat [tokens] tensors: pure, without a model, a batch or a process group.

Every loss is a *sum* over tokens. Who calls divides by the number of trained tokens of the whole optimizer step, over all
micro-batches and data-parallel ranks: the token mean of DAPO (arXiv 2503.14476, section 3.3), in which a long response weighs as
many tokens as it has and no choice of micro-batches or ranks changes the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss to differentiate and what to report about it; all sums are over tokens whose mask is True."""

    loss: Tensor
    """Scalar with gradient: sum over tokens."""
    clipped: Tensor
    """Scalar: tokens whose gradient the clip removed."""
    ratio_sum: Tensor
    """Scalar: sum of the probability ratios."""
    ratio_max: Tensor
    """Scalar: largest ratio; 0 without tokens."""
    kl_sum: Tensor
    """Scalar: sum of the k3 estimates of KL(rollout || trainer), each ratio - 1 - log ratio >= 0 (schulman.com, "Approximating KL divergence")."""


def grpo(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Clipped policy gradient against the policy that sampled.

    Per token, with ratio = exp(logprob - rollout logprob) and A the advantage of its sample:
    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).
    The objective is PPO's (arXiv 1707.06347, equation 7) with GRPO's advantages (arXiv 2402.03300, equation 3) and without a KL
    term; the two clip widths are DAPO's "clip-higher" (arXiv 2503.14476, equation 10).

    Args:
        logprobs: float32 [tokens] with gradient.
        rollout_logprobs: float32 [tokens], of the policy that sampled, at the same temperature.
        advantages: float32 [tokens].
        mask: bool [tokens]; False takes a token out of the loss and of every sum, whatever its values.
    """
    difference = torch.where(mask, logprobs - rollout_logprobs, 0.0)
    ratio = difference.exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = _sum_where(mask, -torch.minimum(ratio * advantages, bounded * advantages))
    with torch.no_grad():
        clipped = mask & (((ratio < 1.0 - clip_low) & (advantages < 0)) | ((ratio > 1.0 + clip_high) & (advantages > 0)))
        counted = torch.where(mask, ratio, 0.0)
        return TokenLoss(
            loss=loss,
            clipped=clipped.sum(),
            ratio_sum=counted.sum(),
            ratio_max=counted.max() if counted.numel() else counted.sum(),
            kl_sum=torch.where(mask, ratio - 1.0 - difference, 0.0).sum(),
        )


def sft(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Cross entropy of the target tokens: minus the sum of `logprobs` (float32 [tokens]) where `mask` (bool [tokens]) is True."""
    return _sum_where(mask, -logprobs)


def _sum_where(mask: Tensor, values: Tensor) -> Tensor:
    """Sum over True entries; where() rather than a product, since 0 * nan is nan."""
    return torch.where(mask, values, 0.0).sum()
