"""On-policy distillation: the policy samples, and a teacher judges each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.policy_gradient import Clipped
from asyncrl.data.batch import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Distill(Clipped):
    """Brings down the reverse KL divergence from a teacher on the policy's own samples (arXiv 2306.13649, section 3).

    The advantage of a token is the teacher's log-prob less the engine's, and rewards play no part. Another algorithm
    with `teacher_weight` adds the same to the advantage that it makes of the reward.
    """

    teacher_weight: float = 1.0

    def advantages(self, rewards: Tensor, batch: RolloutBatch) -> Tensor:
        """0: only the teacher counts."""
        return torch.zeros_like(rewards)
