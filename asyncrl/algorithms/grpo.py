"""GRPO: a clipped policy gradient with advantages relative to the prompt group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncrl.algorithms.advantages import group_advantages, groups_without_signal
from asyncrl.algorithms.algorithm import Columns, Needs, TokenInputs, TokenLoss, sum_where
from asyncrl.data.batch import RolloutBatch


@dataclass(frozen=True)
class Grpo:
    """Clipped policy gradient against the policy that sampled.

    Per token, with ratio = exp(log-prob - engine's log-prob) and A the advantage of its sample:
    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).
    The objective is PPO's (arXiv 1707.06347, equation 7) with GRPO's advantages (arXiv 2402.03300, equation 3) and
    without a KL term; the two clip widths are DAPO's "clip-higher" (arXiv 2503.14476, equation 10), and so is the mean
    over all tokens of the step (section 3.3), in which a long response weighs as many tokens as it has.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    normalize_advantages: bool = True
    """Divide by the group's standard deviation (GRPO); False is Dr. GRPO."""

    needs: ClassVar[Needs] = Needs(group_samples=2)

    def columns(self, batch: RolloutBatch) -> Columns:
        """`advantages`, the same for all tokens of a sample."""
        advantages = group_advantages(batch.rewards, batch.group_index, normalize=self.normalize_advantages)
        silent = groups_without_signal(batch.rewards, batch.group_index)
        return Columns({"advantages": advantages[batch.token_samples]}, {"groups_without_signal": float(silent)})

    def loss(self, tokens: TokenInputs) -> TokenLoss:
        """Reports `clip_fraction` (tokens whose gradient the clip removed), `ratio_mean`, `ratio_max` and `kl_rollout`.

        The last is the mean of k3 estimates of KL(rollout || trainer), ratio - 1 - log ratio >= 0 (J. Schulman,
        "Approximating KL divergence").
        """
        mask, advantages = tokens.mask, tokens.advantages
        difference = torch.where(mask, tokens.logprobs - tokens.engine_logprobs, 0.0)
        ratio = difference.exp()
        bounded = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        loss = sum_where(mask, -torch.minimum(ratio * advantages, bounded * advantages))
        with torch.no_grad():
            low, high = ratio < 1.0 - self.clip_low, ratio > 1.0 + self.clip_high
            clipped = (low & (advantages < 0)) | (high & (advantages > 0))
            counted = torch.where(mask, ratio, 0.0)
            sums = {
                "clip_fraction": (clipped & mask).sum(),
                "ratio_mean": counted.sum(),
                "kl_rollout": sum_where(mask, ratio - 1.0 - difference),
            }
            return TokenLoss(loss, sums, {"ratio_max": counted.max()})
