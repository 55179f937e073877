"""Estimates of the KL divergence of the policy from a reference, token by token (J. Schulman 2020, kl-approx).

With d = log-prob under the policy - log-prob under the reference, of a token that the policy sampled:

    k1        d                            unbiased, of either sign; for the reward: as a loss its mean gradient is 0
    k2        d^2 / 2                      biased; its gradient is that of the KL divergence on policy
    k3        exp(-d) - 1 + d              unbiased on policy, at least 0; GRPO's (arXiv 2402.03300, equation 4)
    unbiased  ratio (exp(-d) - 1 + d)      k3 weighed by policy over sampling policy, so that value and gradient are
                                           unbiased off policy as well (DeepSeek-V3.2, arXiv 2512.02556, section 3.1)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "unbiased"]

METRICS: Mapping[str, str] = {
    "train/kl_reference": "KL divergence of the policy from the reference in nat per token, by k3 (algorithm.kl).",
    "train/kl_penalty": 'Mean over samples of what is taken off the reward for it (algorithm.kl = "reward").',
    "train/kl_teacher": (
        "Mean over trained tokens of the engine's log-prob less the teacher's, in nat: the reverse KL divergence "
        "from the teacher that distillation brings down."
    ),
}
"""What the figures are."""


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Estimator, log_ratio: Tensor | None = None) -> Tensor:
    """The estimate for each token.

    Args:
        logprobs: float32 [R] under the policy, with or without gradient.
        reference: float32 [R] under the reference.
        log_ratio: float32 [R]: log-prob under the policy - when the token was sampled; None stands for 0.

    Returns:
        float32 [R].
    """
    d = logprobs - reference
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    k3 = torch.exp(-d) - 1 + d
    return k3 if estimator == "k3" or log_ratio is None else log_ratio.exp() * k3
