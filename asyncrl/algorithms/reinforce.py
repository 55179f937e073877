"""REINFORCE++, and its form with the group's mean as baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from asyncrl.algorithms.advantages import group_advantages, normalized_over_tokens
from asyncrl.algorithms.policy_gradient import Clipped
from asyncrl.data.batch import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(Clipped):
    """REINFORCE++ (arXiv 2501.03262): rewards normalised over all trained tokens of the batch, and PPO's clip.

    A = (reward - mean) / std over the tokens of the batch (equation 6, without a KL term and with a discount of 1).
    """

    def advantages(self, rewards: Tensor, batch: RolloutBatch) -> Tensor:
        """Normalised over tokens."""
        return normalized_over_tokens(rewards, _trained(batch))


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    """REINFORCE++-baseline: the reward less the mean of its group first, then normalised over tokens (section 3.2)."""

    group_samples: ClassVar[int] = 2

    def advantages(self, rewards: Tensor, batch: RolloutBatch) -> Tensor:
        """Centred by group, normalised over tokens."""
        return normalized_over_tokens(group_advantages(rewards, batch.group_index, normalize=False), _trained(batch))


def _trained(batch: RolloutBatch) -> Tensor:
    """int64 [samples]: trained tokens of each."""
    return torch.bincount(batch.token_samples[batch.loss_mask], minlength=batch.num_samples)
