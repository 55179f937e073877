"""CISPO: importance weights are clipped, and no token loses its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.algorithms.algorithm import TokenInputs
from asyncrl.algorithms.policy_gradient import PolicyGradient, Surrogate
from asyncrl.data.batch import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Cispo(PolicyGradient):
    """CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5): loss = -sg(min(ratio, ratio_max)) A log-prob.

    The advantage is GRPO's. `clip_fraction` counts tokens whose weight was cut; they keep a gradient.
    """

    ratio_max: float = 5.0
    """Largest weight of a token. The paper bounds it from above alone."""
    normalize_advantages: bool = True

    group_samples: ClassVar[int] = 2

    def advantages(self, rewards: Tensor, batch: RolloutBatch) -> Tensor:
        """Reward less the mean of the group."""
        return group_advantages(rewards, batch.group_index, normalize=self.normalize_advantages)

    def surrogate(self, log_ratio: Tensor, tokens: TokenInputs) -> Surrogate:
        """Weighted log-probs."""
        ratio = log_ratio.detach().exp()
        weights = ratio.clamp(max=self.ratio_max)
        logprobs = torch.where(tokens.mask, tokens.logprobs, 0.0)
        return Surrogate(-weights * tokens.advantages * logprobs, ratio > self.ratio_max)
