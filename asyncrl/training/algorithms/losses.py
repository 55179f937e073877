"""Losses on flat [tokens] tensors: pure, without a model, a batch or a process group.

Every loss is a *sum* over tokens. Who calls divides by the number of trained tokens of the whole optimizer step, over
all micro-batches and data-parallel ranks: the token mean of DAPO (arXiv 2503.14476, section 3.3), in which a long
response weighs as many tokens as it has and no choice of micro-batches or ranks changes the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss to differentiate and what to report about it."""

    loss: Tensor
    """Scalar with gradient: sum over the tokens whose mask is True."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Scalars to be added up over micro-batches and ranks and divided by the number of tokens."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Scalars of which the largest is reported."""


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
    The objective is PPO's (arXiv 1707.06347, equation 7) with GRPO's advantages (arXiv 2402.03300, equation 3) and
    without a KL term; the two clip widths are DAPO's "clip-higher" (arXiv 2503.14476, equation 10).

    Args:
        logprobs: float32 [tokens] with gradient.
        rollout_logprobs: float32 [tokens], of the policy that sampled, at the same temperature.
        advantages: float32 [tokens].
        mask: bool [tokens]; False takes a token out of the loss and of every sum, whatever its values.

    Returns:
        Sums `clip_fraction` (tokens whose gradient the clip removed), `ratio_mean`, and `kl_rollout`: k3 estimates of
        KL(rollout || trainer), ratio - 1 - log ratio >= 0 (J. Schulman, "Approximating KL divergence"). Maximum
        `ratio_max`.
    """
    difference = torch.where(mask, logprobs - rollout_logprobs, 0.0)
    ratio = difference.exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = _sum_where(mask, -torch.minimum(ratio * advantages, bounded * advantages))
    with torch.no_grad():
        clipped = ((ratio < 1.0 - clip_low) & (advantages < 0)) | ((ratio > 1.0 + clip_high) & (advantages > 0))
        counted = torch.where(mask, ratio, 0.0)
        sums = {
            "clip_fraction": (clipped & mask).sum(),
            "ratio_mean": counted.sum(),
            "kl_rollout": torch.where(mask, ratio - 1.0 - difference, 0.0).sum(),
        }
        maxima = {"ratio_max": counted.max()}
    return TokenLoss(loss, sums, maxima)


def sft(logprobs: Tensor, mask: Tensor) -> TokenLoss:
    """Cross entropy of the target tokens: minus the sum of `logprobs` (float32 [tokens]) where `mask` (bool [tokens])
    is True."""
    return TokenLoss(_sum_where(mask, -logprobs))


def _sum_where(mask: Tensor, values: Tensor) -> Tensor:
    """Sum over True entries; where() rather than a product, since 0 * nan is nan."""
    return torch.where(mask, values, 0.0).sum()
