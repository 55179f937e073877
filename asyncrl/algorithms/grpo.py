"""GRPO and its variants: a clipped policy gradient with advantages relative to the prompt group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.algorithms.aggregation import Unit
from asyncrl.algorithms.policy_gradient import Clipped
from asyncrl.data.batch import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Grpo(Clipped):
    """Clipped policy gradient against the policy that sampled.

    Per token, with ratio = exp(log-prob - engine's log-prob) and A the advantage of its sample:
    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).
    The objective is PPO's (arXiv 1707.06347, equation 7) with GRPO's advantages (arXiv 2402.03300, equation 3) and
    without a KL term; the two clip widths are DAPO's "clip-higher" (arXiv 2503.14476, equation 10), and so is the mean
    over all tokens of the step (section 3.3), in which a long response weighs as many tokens as it has. The paper's
    own mean is `aggregation = "sequence"`.
    """

    clip_high: float = 0.28
    normalize_advantages: bool = True
    """Divide by the group's standard deviation (GRPO); False is Dr. GRPO's advantage."""

    group_samples: ClassVar[int] = 2

    def advantages(self, rewards: Tensor, batch: RolloutBatch) -> Tensor:
        """Reward less the mean of the group."""
        return group_advantages(rewards, batch.group_index, normalize=self.normalize_advantages)


@dataclass(frozen=True, kw_only=True)
class DrGrpo(Grpo):
    """Dr. GRPO (arXiv 2503.20783): no division by the group's standard deviation, nor by the length of a response.

    The sum over the tokens of a response is divided by the constant `max_new_tokens`.
    """

    clip_high: float = 0.2
    normalize_advantages: bool = False
    aggregation: Unit = "fixed"


@dataclass(frozen=True, kw_only=True)
class Dapo(Grpo):
    """DAPO (arXiv 2503.14476): clip-higher, the mean over tokens, and responses that are cut off do not train.

    Its dynamic sampling is `rollout.filters = ["zero_variance"]`, its soft punishment `algorithm.overlong_tokens`.
    """

    truncated_weight: float = 0.0
