"""Corrections for tokens of another policy than the one that trains, and figures that say whether one is needed.

The engine's log-probs differ from the trainer's for two reasons: older weights made the token, and engine and trainer
compute the same weights differently. With d = log-prob under the trainer's weights before the step - the engine's, an
importance weight is exp(d) of each token, exp(sum d) of its sequence, or exp(mean d) of its sequence (geometric). It
multiplies the token's loss, and has no gradient.

- `truncate` bounds it: min(weight, upper), and max(weight, lower) (arXiv 2505.24298; Yao et al. 2025, "Your efficient
  RL framework secretly brings you off-policy RL training").
- `auto` is `off` until the mismatch of a step is over `AUTO_MISMATCH`, and `truncate` from then on.
- `mask` drops what lies outside: 0 unless lower <= weight <= upper. At the level of tokens with 0.5 and 5 this is
  IcePop's band (Ring-1T, arXiv 2510.18855). A dropped token still counts in the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.algorithms.algorithm import TokenInputs

Kind = Literal["off", "auto", "truncate", "mask"]
Level = Literal["token", "sequence", "geometric"]

AUTO_MISMATCH = 0.01
"""`auto` corrects from the step on after one whose mismatch (k3, in nat per token) is over it. On policy it is 1e-9 in
float32, and about the square of train/logprob_diff_mean in bfloat16 (0.02: 4e-4). At 0.01 ratios of 0.87 and 1.15 are
usual, and clips of 0.2 begin to bind before anything was trained."""

METRICS: Mapping[str, str] = {
    "train/mismatch_k1": (
        "Mean over trained tokens of the engine's log-prob less the trainer's before the step, in nat: an estimate of "
        "the KL divergence of the sampling policy from the trained one, of either sign (J. Schulman's k1)."
    ),
    "train/mismatch_k3": "The same by the k3 estimate (ratio - 1 - log ratio), which is at least 0.",
    "train/mismatch_ratio_p1": "First percentile of the ratio of a token's probability, trainer over engine.",
    "train/mismatch_ratio_p99": "Its 99th percentile.",
    "train/mismatch_ess": (
        "Effective sample size of the trained tokens under these ratios, as a fraction: 1 on policy, and small where a "
        "few tokens would carry the gradient."
    ),
    "train/mismatch_k3_staleness_<s>": "`mismatch_k3` over tokens that are s rollout batches stale.",
    "train/correction_weight": "Mean importance weight after its bounds (algorithm.correction).",
    "train/corrected_high": "Fraction of the trained tokens whose weight was over correction_upper.",
    "train/corrected_low": "Fraction whose weight was under correction_lower.",
}
"""What the figures are. `mismatch_k3` is of the first optimizer step of a batch, or of the whole batch where log-probs
are recomputed before the step; the others of the mismatch are there in that case alone."""


@dataclass(frozen=True, slots=True)
class Correction:
    """See the module's docstring."""

    kind: Kind = "off"
    level: Level = "token"
    upper: float = 2.0
    lower: float = 0.0

    def weights(self, tokens: TokenInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The weight of each token, float32 [R] without gradient, and sums for the figures.

        Needs `tokens.old_logprobs`.
        """
        with torch.no_grad():
            d = torch.where(tokens.mask, tokens.old_logprobs - tokens.engine_logprobs, 0.0)
            if self.level != "token":
                d = tokens.over_sequence(d, mean=self.level == "geometric")
            high, low = d > math.log(self.upper), d < (math.log(self.lower) if self.lower > 0 else -math.inf)
            if self.kind != "mask":
                d = d.clamp(max=math.log(self.upper), min=math.log(self.lower) if self.lower > 0 else None)
                weights = d.exp()
            else:
                weights = torch.where(high | low, 0.0, d).exp().masked_fill(high | low, 0.0)
            figures = {
                "correction_weight": torch.where(tokens.mask, weights, 0.0).sum(),
                "corrected_high": (high & tokens.mask).sum(),
                "corrected_low": (low & tokens.mask).sum(),
            }
            return weights, figures


NO_CORRECTION = Correction()


def mismatch(difference: Tensor, staleness: Tensor) -> dict[str, float]:
    """Figures of `METRICS`, of trained tokens.

    Args:
        difference: float32 [tokens]: log-prob under the trainer's weights before the step - the engine's.
        staleness: float32 [tokens], as `TokenInputs.staleness`.
    """
    if not len(difference):
        return {}
    d = difference.double()
    ratio = d.exp()
    k3 = ratio - 1 - d
    at = torch.quantile(ratio[:: max(1, len(ratio) // 1_000_000)], torch.tensor([0.01, 0.99], dtype=torch.float64))
    figures = {
        "mismatch_k1": -d.mean(),
        "mismatch_k3": k3.mean(),
        "mismatch_ratio_p1": at[0],
        "mismatch_ratio_p99": at[1],
        "mismatch_ess": ratio.sum() ** 2 / (len(d) * (ratio**2).sum()),
    }
    known = staleness.isfinite()
    for age in torch.unique(staleness[known]).tolist():
        figures[f"mismatch_k3_staleness_{int(age)}"] = k3[staleness == age].mean()
    return {name: float(value) for name, value in figures.items()}
