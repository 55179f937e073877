"""Advantages of samples: how much better a sample did than the others of its prompt group, or of its batch.

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


def leave_one_out_advantages(rewards: Tensor, group_index: Tensor) -> Tensor:
    """The reward of each sample less the mean of the *other* samples of its group (RLOO, arXiv 2402.14740).

    Args:
        rewards: float [samples].
        group_index: int64 [samples], any non-negative ids.

    Returns:
        float32 [samples]; 0 for a group of one sample. Of a group of n it is n / (n - 1) times reward minus mean.
    """
    if rewards.numel() == 0:
        return torch.zeros(0, dtype=torch.float32)
    _, index, count = torch.unique(group_index, return_inverse=True, return_counts=True)
    size = count[index].double()
    centred = group_advantages(rewards, group_index, normalize=False)
    return torch.mul(centred, size / (size - 1).clamp(min=1)).float()


def normalized_over_tokens(values: Tensor, tokens: Tensor) -> Tensor:
    """`values` less their mean, over their standard deviation; a sample counts as often as it has tokens.

    It is what whitening an advantage over all trained tokens of the batch gives (REINFORCE++, arXiv 2501.03262,
    equation 6).

    Args:
        values: float [samples].
        tokens: int64 [samples]: trained tokens of each.

    Returns:
        float32 [samples]; all 0 where all values are equal.
    """
    exact, weight = values.double(), tokens.double()
    total = weight.sum()
    if total == 0 or bool((exact == exact[0]).all()):
        return torch.zeros(len(values), dtype=torch.float32)
    centred = exact - (exact * weight).sum() / total
    variance = (centred**2 * weight).sum() / (total - 1).clamp(min=1)
    return (centred / (variance.sqrt() + _STD_FLOOR)).float()


def groups_without_signal(rewards: Tensor, group_index: Tensor) -> int:
    """Groups whose samples all earned the same reward: they add nothing to the gradient."""
    _, index = torch.unique(group_index, return_inverse=True)
    groups = int(index.max()) + 1 if index.numel() else 0
    low = torch.full((groups,), torch.inf).scatter_reduce_(0, index, rewards.float(), "amin")
    high = torch.full((groups,), -torch.inf).scatter_reduce_(0, index, rewards.float(), "amax")
    return int((low == high).sum())
