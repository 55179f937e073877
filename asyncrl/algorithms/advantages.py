"""Group-relative advantages: how much better a sample did than the others of its prompt group.

Groups are known by index, never by position or text: samples of one group may lie anywhere in the batch, groups may
be of any size (a failed sample is simply absent), and the same prompt in two groups makes two baselines.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STD_FLOOR = 1e-6
"""Added to the standard deviation, so that rewards that differ by rounding alone do not become unit advantages."""


def group_advantages(rewards: Tensor, group_index: Tensor, *, normalize: bool) -> Tensor:
    """Advantage of each sample over its group's mean reward.

    Args:
        rewards: float [samples].
        group_index: int64 [samples], any non-negative ids.
        normalize: divide by the group's sample standard deviation (n - 1): GRPO (DeepSeekMath, arXiv 2402.03300,
            section 4.1). False is Dr. GRPO (arXiv 2503.20783): reward minus mean, so that easy and hard prompts are
            not weighted up.

    Returns:
        float32 [samples]; 0 for a group of one sample and for a group whose rewards are all equal.
    """
    if rewards.numel() == 0:
        return torch.zeros(0, dtype=torch.float32)
    _, index = torch.unique(group_index, return_inverse=True)
    values = rewards.double()
    groups = int(index.max()) + 1
    count = torch.zeros(groups, dtype=torch.float64).index_add_(0, index, torch.ones_like(values))
    mean = torch.zeros(groups, dtype=torch.float64).index_add_(0, index, values) / count
    centred = values - mean[index]
    low = torch.full((groups,), torch.inf, dtype=torch.float64).scatter_reduce_(0, index, values, "amin")
    high = torch.full((groups,), -torch.inf, dtype=torch.float64).scatter_reduce_(0, index, values, "amax")
    if normalize:
        variance = torch.zeros(groups, dtype=torch.float64).index_add_(0, index, centred**2) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + _STD_FLOOR)[index]
    return torch.where((low == high)[index], 0.0, centred).float()


def groups_without_signal(rewards: Tensor, group_index: Tensor) -> int:
    """Groups whose samples all earned the same reward: they add nothing to the gradient."""
    _, index = torch.unique(group_index, return_inverse=True)
    groups = int(index.max()) + 1 if index.numel() else 0
    low = torch.full((groups,), torch.inf).scatter_reduce_(0, index, rewards.float(), "amin")
    high = torch.full((groups,), -torch.inf).scatter_reduce_(0, index, rewards.float(), "amax")
    return int((low == high).sum())
