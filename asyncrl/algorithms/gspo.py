"""GSPO: the ratio of a whole sequence is clipped, not that of a token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from asyncrl.algorithms.aggregation import Unit
from asyncrl.algorithms.algorithm import TokenInputs
from asyncrl.algorithms.grpo import Grpo
from asyncrl.algorithms.policy_gradient import Surrogate


@dataclass(frozen=True, kw_only=True)
class Gspo(Grpo):
    """GSPO (arXiv 2507.18071, equations 5 to 7): ratio s = exp(mean log-ratio over the trained tokens of the sequence).

    loss = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), the mean over sequences.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    aggregation: Unit = "sequence"

    def surrogate(self, log_ratio: Tensor, tokens: TokenInputs) -> Surrogate:
        """PPO's, of the ratio of the sequence."""
        return super().surrogate(tokens.over_sequence(log_ratio, mean=True), tokens)


@dataclass(frozen=True, kw_only=True)
class GspoToken(Gspo):
    """GSPO-token (equations 13 to 15): the value of GSPO's ratio, with the gradient of each token's own log-prob.

    Where all tokens of a sequence have one advantage, value and gradient are GSPO's; an algorithm that gives each token
    its own advantage derives from it.
    """

    def surrogate(self, log_ratio: Tensor, tokens: TokenInputs) -> Surrogate:
        """PPO's, of s / sg(token's probability) * token's probability."""
        of_sequence = tokens.over_sequence(log_ratio, mean=True).detach()
        return Grpo.surrogate(self, of_sequence + log_ratio - log_ratio.detach(), tokens)
