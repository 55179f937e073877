"""GRPO: a clipped policy gradient with advantages relative to the prompt group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncrl.algorithms.advantages import group_advantages, groups_without_signal
from asyncrl.algorithms.algorithm import Columns, Needs, TokenInputs, TokenLoss, sum_where
from asyncrl.data.batch import RolloutBatch

METRICS: Mapping[str, str] = {
    "train/groups_without_signal": "Groups whose rewards are all equal: each of their advantages is 0.",
    "train/advantage_std": "Standard deviation of the advantages over the samples: 0 where no group has a signal.",
    "train/advantage_max": "Largest magnitude of an advantage.",
    "train/clip_fraction": "Fraction of the trained tokens whose gradient the clip removed.",
    "train/ratio_mean": (
        "Mean ratio of a token's probability under the trainer's weights to that when it was sampled; 1 on policy."
    ),
    "train/ratio_max": "Largest of these ratios.",
    "train/off_policy_drift": (
        "How far the trained weights are from those that sampled, in nat per token: the mean of ratio - 1 - log ratio, "
        "which is at least 0 (J. Schulman's k3 estimate). It is no KL to a reference model, and nothing is penalised."
    ),
}
"""What the figures of GRPO are."""


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
        """`advantages`, the same for all tokens of a sample; reports the figures of `METRICS` that are of the batch."""
        advantages = group_advantages(batch.rewards, batch.group_index, normalize=self.normalize_advantages)
        silent = groups_without_signal(batch.rewards, batch.group_index)
        metrics = {"groups_without_signal": float(silent)}
        if advantages.numel():
            metrics["advantage_std"] = float(advantages.std(correction=0))
            metrics["advantage_max"] = float(advantages.abs().max())
        return Columns({"advantages": advantages[batch.token_samples]}, metrics)

    def loss(self, tokens: TokenInputs) -> TokenLoss:
        """Reports the figures of `METRICS` that are sums or maxima over tokens."""
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
                "off_policy_drift": sum_where(mask, ratio - 1.0 - difference),
            }
            return TokenLoss(loss, sums, {"ratio_max": counted.max()})
