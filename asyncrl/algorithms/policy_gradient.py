"""What all policy gradients share: rewards, advantages of samples, a loss of each token, and how tokens add up.

A kind of policy gradient says two things: the advantage of each sample (`advantages`), and the loss of each token from
its log-ratio to the policy that it is compared with (`surrogate`). The settings below hold for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from asyncrl.algorithms.advantages import groups_without_signal
from asyncrl.algorithms.aggregation import Aggregation, Unit
from asyncrl.algorithms.algorithm import (
    OLD_LOGPROBS,
    Columns,
    Needs,
    TokenInputs,
    TokenLoss,
    role_logprobs,
    sum_where,
)
from asyncrl.algorithms.kl import Estimator, kl_estimate
from asyncrl.algorithms.off_policy import NO_CORRECTION, Correction
from asyncrl.config.sections.algorithm import REFERENCE, TEACHER
from asyncrl.data.batch import RolloutBatch
from asyncrl.errors import AlgorithmError

METRICS: Mapping[str, str] = {
    "train/groups_without_signal": (
        "Groups whose rewards are all equal: each of their advantages is 0. Absent where groups are not compared."
    ),
    "train/advantage_std": "Standard deviation of the advantages over the samples: 0 where no group has a signal.",
    "train/advantage_max": "Largest magnitude of an advantage.",
    "train/overlong_penalty": "Mean penalty of a sample for a response that is too long (algorithm.overlong_tokens).",
    "train/truncated_out": "Samples that are not trained, since their response was cut off.",
    "train/clip_fraction": "Fraction of the trained tokens whose gradient the clip removed.",
    "train/ratio_mean": (
        "Mean ratio of a token's probability under the trainer's weights to that when it was sampled (or, where "
        "log-probs are recomputed before the step, to that); 1 on policy."
    ),
    "train/ratio_max": "Largest of these ratios.",
    "train/off_policy_drift": (
        "How far the trained weights are from those of that ratio, in nat per token: the mean of ratio - 1 - log "
        "ratio, which is at least 0 (J. Schulman's k3 estimate). It is no KL to a reference model."
    ),
}
"""What the figures of policy gradients are."""


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The loss of each token, before weights."""

    losses: Tensor
    """float32 [R] with gradient."""
    clipped: Tensor
    """bool [R]: the clip removed the gradient of the token."""


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(ABC):
    """See the module's docstring. A subclass gives `advantages` and `surrogate`."""

    aggregation: Unit = "token"
    """How tokens add up (`asyncrl/algorithms/aggregation.py`)."""
    max_new_tokens: int = 1
    """Most tokens of a response: the length of `fixed` aggregation, and the limit of `overlong_tokens`."""
    entropy_bonus: float = 0.0
    """Added per token: minus this times the entropy (arXiv 1602.01783, section 4)."""
    truncated_weight: float = 1.0
    """What the advantage of a sample is multiplied by whose response was cut off; 0 does not train it at all (DAPO's
    overlong filtering, arXiv 2503.14476, section 3.4)."""
    overlong_tokens: int = 0
    """Tokens before `max_new_tokens` over which the reward falls (DAPO's soft punishment, equation 13); 0: none."""
    overlong_penalty: float = 1.0
    """By how much it has fallen at `max_new_tokens`."""
    old_logprobs: Literal["engine", "trainer"] = "engine"
    """The policy that ratios compare with: as the engine told, or the trainer's weights before the step (one more
    forward pass). With a correction: the trainer's (decoupled PPO, arXiv 2110.00641)."""
    correction: Correction = NO_CORRECTION
    """For tokens of another policy (`asyncrl/algorithms/off_policy.py`)."""

    kl: Literal["off", "loss", "reward"] = "off"
    """Holds the policy close to a reference: a term of each token's loss, or taken off the reward of a sample."""
    kl_coefficient: float = 0.001
    kl_estimator: Estimator = "k3"
    """As `asyncrl/algorithms/kl.py` defines them."""
    teacher_weight: float = 0.0
    """Added to the advantage of a token: this times the teacher's log-prob less the engine's (arXiv 2306.13649)."""

    own_advantages: Callable[[Tensor, RolloutBatch], Tensor] | None = None
    """In the place of `advantages`; may also give one number for each token, float32 [T]."""
    own_losses: Callable[[TokenInputs], Tensor] | None = None
    """In the place of `surrogate`: float32 [R] with gradient."""

    group_samples: ClassVar[int] = 1
    """As `Needs.group_samples`."""

    @property
    def needs(self) -> Needs:
        """By the settings."""
        return Needs(
            group_samples=self.group_samples,
            entropy_gradient=self.entropy_bonus != 0,
            old_logprobs=self.old_logprobs == "trainer" or self.correction.kind in ("truncate", "mask"),
            roles=(REFERENCE,) * (self.kl != "off") + (TEACHER,) * (self.teacher_weight != 0),
            aggregation=Aggregation(self.aggregation, self.max_new_tokens),
        )

    @abstractmethod
    def advantages(self, rewards: Tensor, batch: RolloutBatch) -> Tensor:
        """float32 [samples], of the rewards that are trained (float32 [samples])."""

    @abstractmethod
    def surrogate(self, log_ratio: Tensor, tokens: TokenInputs) -> Surrogate:
        """From float32 [R] with gradient: log-prob - that of the policy compared with; 0 where the mask is False."""

    def columns(self, batch: RolloutBatch) -> Columns:
        """`advantages`, the same for all tokens of a sample; reports the figures of `METRICS` that are of the batch."""
        rewards, metrics = batch.rewards, dict[str, float]()
        if self.overlong_tokens:
            penalties = self._overlong(batch)
            rewards = rewards - penalties
            metrics["overlong_penalty"] = float(penalties.mean()) if len(penalties) else 0.0
        if self.kl == "reward":
            penalties = self._kl_penalties(batch)
            rewards = rewards - penalties
            metrics["kl_penalty"] = float(penalties.mean()) if len(penalties) else 0.0
        cut_off, keep = batch.truncated[batch.token_samples], None
        if self.truncated_weight == 0:
            keep = ~cut_off
            batch = replace(batch, loss_mask=batch.loss_mask & keep)
            metrics["truncated_out"] = float(batch.truncated.sum())
        advantages = (self.own_advantages or self.advantages)(rewards, batch)
        if tuple(advantages.shape) not in ((batch.num_samples,), (len(batch.tokens),)):
            raise AlgorithmError(
                f"train.algorithm: advantages of {type(self).__name__} are of shape {list(advantages.shape)}, not one "
                f"for each of the {batch.num_samples} samples or of the {len(batch.tokens)} tokens"
            )
        by_token = len(advantages) == len(batch.tokens)
        of_tokens = advantages if by_token else advantages[batch.token_samples]
        if self.group_samples > 1 and self.own_advantages is None:
            metrics["groups_without_signal"] = float(groups_without_signal(rewards, batch.group_index))
        if (counted := advantages[batch.loss_mask] if by_token else advantages).numel():
            metrics["advantage_std"] = float(counted.std(correction=0))
            metrics["advantage_max"] = float(counted.abs().max())
        if self.teacher_weight:
            gain = torch.where(batch.loss_mask, batch.columns[role_logprobs(TEACHER)] - batch.logprobs, 0.0)
            of_tokens = of_tokens + self.teacher_weight * gain
            metrics["kl_teacher"] = -float(gain.sum()) / max(int(batch.loss_mask.sum()), 1)
        if self.truncated_weight not in (0, 1):
            of_tokens = torch.where(cut_off, of_tokens * self.truncated_weight, of_tokens)
        return Columns({"advantages": of_tokens}, metrics, keep)

    def loss(self, tokens: TokenInputs) -> TokenLoss:
        """Reports the figures of `METRICS` that are sums or maxima over tokens."""
        mask = tokens.mask
        recomputed = OLD_LOGPROBS in tokens.columns
        compared = tokens.old_logprobs if recomputed else tokens.engine_logprobs
        log_ratio = torch.where(mask, tokens.logprobs - compared, 0.0)
        if self.own_losses is None:
            made = self.surrogate(log_ratio, tokens)
        else:
            made = Surrogate(torch.where(mask, self.own_losses(tokens), 0.0), torch.zeros_like(mask))
        losses, figures = made.losses, dict[str, Tensor]()
        if recomputed and self.correction.kind != "off":
            weights, figures = self.correction.weights(tokens)
            losses = losses * weights
        loss = tokens.total(losses)
        if self.entropy_bonus:
            loss = loss - self.entropy_bonus * tokens.total(tokens.entropies)
        if self.kl == "loss":
            reference = torch.where(mask, tokens.role_logprobs(REFERENCE), 0.0)
            logprobs = torch.where(mask, tokens.logprobs, 0.0)
            since_sampled = torch.where(mask, tokens.logprobs - tokens.engine_logprobs, 0.0)
            loss = loss + self.kl_coefficient * tokens.total(
                kl_estimate(logprobs, reference, self.kl_estimator, since_sampled)
            )
        with torch.no_grad():
            if self.kl != "off":
                distance = kl_estimate(tokens.logprobs, tokens.role_logprobs(REFERENCE), "k3")
                figures["kl_reference"] = sum_where(mask, distance)
            ratio = log_ratio.exp()
            counted = torch.where(mask, ratio, 0.0)
            sums = {
                "clip_fraction": (made.clipped & mask).sum(),
                "ratio_mean": counted.sum(),
                "off_policy_drift": sum_where(mask, ratio - 1.0 - log_ratio),
            }
            return TokenLoss(loss, {**sums, **figures}, {"ratio_max": counted.max()})

    def _kl_penalties(self, batch: RolloutBatch) -> Tensor:
        """float32 [samples]: the estimate when it was sampled, over all trained tokens, times the coefficient."""
        kept = batch.loss_mask
        estimates = kl_estimate(batch.logprobs[kept], batch.columns[role_logprobs(REFERENCE)][kept], self.kl_estimator)
        sums = torch.zeros(batch.num_samples).index_add_(0, batch.token_samples[kept], estimates)
        return self.kl_coefficient * sums

    def _overlong(self, batch: RolloutBatch) -> Tensor:
        """float32 [samples]: 0 up to `max_new_tokens - overlong_tokens` tokens in the longest response, then rising
        linearly."""
        begins = batch.sampled & ~batch.sampled.roll(1)  # of a response: what comes first in a sequence is not sampled
        lengths = torch.bincount(begins.cumsum(0)[batch.sampled])[1:].float()
        longest = torch.zeros(batch.num_samples).scatter_reduce_(0, batch.token_samples[begins], lengths, "amax")
        over = longest - (self.max_new_tokens - self.overlong_tokens)
        return self.overlong_penalty * (over / self.overlong_tokens).clamp(0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Clipped(PolicyGradient):
    """PPO's surrogate: loss = -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) (arXiv 1707.06347, equation 7).

    With `dual_clip` = c, the loss of a negative advantage is at most c |A| (arXiv 1912.09729, equation 5).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """Over 1."""

    def surrogate(self, log_ratio: Tensor, tokens: TokenInputs) -> Surrogate:
        """See the class's docstring."""
        advantages, ratio = tokens.advantages, log_ratio.exp()
        bounded = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        losses = -torch.minimum(ratio * advantages, bounded * advantages)
        with torch.no_grad():
            low, high = ratio < 1.0 - self.clip_low, ratio > 1.0 + self.clip_high
            clipped = (low & (advantages < 0)) | (high & (advantages > 0))
        if self.dual_clip is not None:
            most = self.dual_clip * advantages.abs()
            clipped = clipped | ((advantages < 0) & (losses.detach() > most))
            losses = torch.where(advantages < 0, torch.minimum(losses, most), losses)
        return Surrogate(losses, clipped)
