"""Algorithms as a user writes them, named by dotted path in tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from asyncrl.algorithms.algorithm import Columns, Needs, TokenInputs, TokenLoss
from asyncrl.algorithms.grpo import Grpo
from asyncrl.algorithms.policy_gradient import PolicyGradient
from asyncrl.data.batch import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class WithEntropy(Grpo):
    """GRPO, with a bonus for the entropy of each token's distribution."""

    weight: float = 0.01
    needs: ClassVar[Needs] = Needs(group_samples=2, entropy_gradient=True)

    def loss(self, tokens: TokenInputs) -> TokenLoss:
        clipped = super().loss(tokens)
        return replace(clipped, loss=clipped.loss - self.weight * tokens.total(tokens.entropies))


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(Grpo):
    """The advantage of RLOO (arXiv 2402.14740): a sample's reward less the mean of the *other* samples of its group."""

    def columns(self, batch: RolloutBatch) -> Columns:
        rewards, groups = batch.rewards, batch.group_index
        size = torch.bincount(groups, minlength=len(batch.group_ids))
        total = torch.zeros(len(size)).index_add_(0, groups, rewards)
        others = (total[groups] - rewards) / (size[groups] - 1).clamp(min=1)
        return Columns({"advantages": (rewards - others)[batch.token_samples]}, {"reward_total": float(total.sum())})


@dataclass(frozen=True, kw_only=True)
class Decoupled(Grpo):
    """Clips against the trainer's own policy before the step (arXiv 2505.24298), and weighs old tokens down."""

    decay: float = 0.5
    needs: ClassVar[Needs] = Needs(group_samples=2, old_logprobs=True, staleness=True)

    def loss(self, tokens: TokenInputs) -> TokenLoss:
        weight = (tokens.old_logprobs - tokens.engine_logprobs).exp() * self.decay**tokens.staleness
        columns = {**tokens.columns, "advantages": tokens.advantages * weight}
        made = super().loss(replace(tokens, engine_logprobs=tokens.old_logprobs, columns=columns))
        oldest = torch.where(tokens.mask, tokens.staleness, 0.0).max()
        return replace(made, maxima={**made.maxima, "staleness_max": oldest})


@dataclass(frozen=True, kw_only=True)
class Broken(Grpo):
    """Fails in `columns` or in `loss`, on the batch of step `step`."""

    method: str = "loss"
    step: int = 1

    def columns(self, batch: RolloutBatch) -> Columns:
        made = super().columns(batch)
        if batch.rollout_id != self.step:
            return made
        if self.method == "columns":
            raise ValueError("boom")
        return Columns({"advantages": torch.full_like(made.tokens["advantages"], torch.pi)})

    def loss(self, tokens: TokenInputs) -> TokenLoss:
        if bool((tokens.advantages > 3.14).any()):
            raise ValueError("boom")
        return super().loss(tokens)


def successes(rewards: Tensor, batch: RolloutBatch) -> Tensor:
    """Learns from the better half of all samples."""
    return (rewards - rewards.mean()).clamp(min=0.0)


def by_token(rewards: Tensor, batch: RolloutBatch) -> Tensor:
    """The first sampled token of each sample counts twice."""
    advantages = rewards[batch.token_samples]
    first = batch.sampled & ~batch.sampled.roll(1)
    return torch.where(first, 2 * advantages, advantages)


def reinforce(tokens: TokenInputs) -> Tensor:
    """Plain REINFORCE, without a ratio."""
    return -tokens.advantages * tokens.logprobs


def answers(value: Any) -> Any:
    """A function that answers with `value`, or raises it."""

    def function(*arguments: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value(*arguments) if callable(value) else value

    return function


few = answers(torch.ones(3))
endless = answers(lambda rewards, batch: rewards / 0)
nothing = answers(None)
failing = answers(ValueError("boom"))
without_gradient = answers(lambda tokens: tokens.engine_logprobs)


class Alone:
    """Derives from nothing of the project."""

    def __init__(self, roles: tuple[str, ...] = ()) -> None:
        self.needs = Needs(roles=tuple(roles))

    def columns(self, batch: RolloutBatch) -> Columns:
        return Columns()

    def loss(self, tokens: TokenInputs) -> TokenLoss:
        return TokenLoss(tokens.total(-tokens.logprobs))


@dataclass(frozen=True, kw_only=True)
class BySequence(Grpo):
    """One number for each sequence, which is neither of samples nor of tokens."""

    def advantages(self, rewards: Tensor, batch: RolloutBatch) -> Tensor:
        return torch.ones(batch.num_sequences)


class Half(PolicyGradient):
    """Says what its advantages are, and not its loss."""

    def advantages(self, rewards: Tensor, batch: RolloutBatch) -> Tensor:
        return rewards
