"""RLOO: REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncrl.algorithms.advantages import leave_one_out_advantages
from asyncrl.algorithms.policy_gradient import Clipped
from asyncrl.data.batch import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Rloo(Clipped):
    """RLOO (arXiv 2402.14740): the advantage is the reward less the mean of the other samples of the group.

    On policy its gradient is that of REINFORCE, -A d log p. Later optimizer steps on the same batch are clipped as
    PPO clips.
    """

    group_samples: ClassVar[int] = 2

    def advantages(self, rewards: Tensor, batch: RolloutBatch) -> Tensor:
        """Reward less the mean of the others of the group."""
        return leave_one_out_advantages(rewards, batch.group_index)
