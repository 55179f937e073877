"""What an algorithm is: pure functions over flat tensors, which know neither model nor backend nor process group.

A step has two parts. `columns` sees the whole batch once, on rank 0, and gives each token numbers by name; these travel
with the batch to all ranks. `loss` sees the tokens of one micro-batch at a time, and returns *sums* over them.

A class of your own is named `package.module:Name` in `train.algorithm`, and is constructed with `train.algorithm_args`.
For example, GRPO that learns from the better samples of a group alone:

    @dataclass(frozen=True, kw_only=True)
    class FromSuccesses(Grpo):
        least: float = 0.0

        def advantages(self, rewards: Tensor, batch: RolloutBatch) -> Tensor:
            return super().advantages(rewards, batch).clamp(min=self.least)

Most ideas are an `advantages` or a `surrogate` of a policy gradient (`policy_gradient.py`), which keeps the settings
that all of them share. The protocol below is for everything else.

Invariants
- No cut of a batch into micro-batches or over ranks changes the result: losses and figures are sums (or maxima), which
  the learner adds up over the whole optimizer step and divides by its number of trained tokens. A sequence is never
  cut, so numbers of a whole sequence may be computed in `loss`; other sequences of its sample may be elsewhere.
- Only what `needs` asks for is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import TOKEN_MEAN, Aggregation
from asyncrl.data.batch import RolloutBatch

OLD_LOGPROBS = "old_logprobs"
STALENESS = "staleness"


@dataclass(frozen=True, slots=True)
class Needs:
    """What must be there for an algorithm. Nothing else is computed."""

    group_samples: int = 1
    """Fewest usable samples of a prompt group; a smaller group is dropped and not trained."""
    engine_logprobs: bool = True
    """The tokens were sampled by the engines: log-probs are computed at the sampling temperature and compared with the
    engines'. False computes them at temperature 1, for text that no policy of this job has sampled."""
    entropy_gradient: bool = False
    """`TokenInputs.entropies` carry gradient."""
    old_logprobs: bool = False
    """A pass before the first optimizer step of the batch, for `TokenInputs.old_logprobs`."""
    staleness: bool = False
    """`TokenInputs.staleness` is there."""
    roles: tuple[str, ...] = ()
    """Models that never train, "reference" or "teacher", which [algorithm] names: their log-probs of the sampled tokens
    are columns of the batch (`role_logprobs`), for `Algorithm.columns` too."""
    aggregation: Aggregation = TOKEN_MEAN
    """How the losses of tokens add up: it makes `TokenInputs.weights`."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What an algorithm computes over the whole batch before the step."""

    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    """Numbers for each token by name, float [T]; those of context are not read. Spread numbers of samples over their
    tokens with `values[batch.token_samples]`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures of the batch, reported as `train/NAME`."""
    keep: Tensor | None = None
    """bool [T]: False for a token that is not to be trained; it counts nowhere. None keeps what the batch keeps."""


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """The sampled tokens of one micro-batch, R of them, on the device of the model."""

    logprobs: Tensor
    """float32 [R] with gradient: log-prob of each token under the weights that are trained."""
    entropies: Tensor
    """float32 [R]: entropy in nat of the distribution that each token was drawn from, under these weights; with
    gradient where `Needs.entropy_gradient` asks for it."""
    engine_logprobs: Tensor
    """float32 [R]: log-prob when the engine sampled the token."""
    mask: Tensor
    """bool [R]: False for a token that takes no part in the loss, whatever its values."""
    columns: Mapping[str, Tensor]
    """float32 [R] each, by name: those of `Algorithm.columns`, and those that the batch came with."""
    sequence: Tensor
    """int64 [R]: the sequence of each token in the batch."""
    sample: Tensor
    """int64 [R]: its sample."""
    group: Tensor
    """int64 [R]: its prompt group."""
    weights: Tensor
    """float32 [R]: what each token counts, by `Needs.aggregation`; 1 for the mean over all tokens."""
    num_sequences: int
    """Sequences in the whole batch; `sequence` is below it."""

    def total(self, values: Tensor) -> Tensor:
        """The sum of `values` [R] over the tokens whose mask is True, each by its weight."""
        return sum_where(self.mask, values * self.weights)

    def over_sequence(self, values: Tensor, *, mean: bool) -> Tensor:
        """float32 [R]: for each token, the sum or the mean of `values` over the unmasked tokens of its sequence."""
        kept = torch.where(self.mask, values, 0.0)
        zeros = kept.new_zeros(self.num_sequences)
        sums = zeros.index_add(0, self.sequence, kept)
        if mean:
            sums = sums / zeros.index_add(0, self.sequence, self.mask.to(kept.dtype)).clamp(min=1.0)
        return sums[self.sequence]

    @property
    def advantages(self) -> Tensor:
        """float32 [R]: the column of this name."""
        return self.columns["advantages"]

    @property
    def old_logprobs(self) -> Tensor:
        """float32 [R]: log-prob under the trainer's weights before the first optimizer step of the batch."""
        return self.columns[OLD_LOGPROBS]

    def role_logprobs(self, role: str) -> Tensor:
        """float32 [R]: log-prob under the model of a role that `Needs.roles` names."""
        return self.columns[role_logprobs(role)]

    @property
    def staleness(self) -> Tensor:
        """float32 [R]: rollout batches trained between the weights that made the token and those before the step; NaN
        where the batch does not tell."""
        return self.columns[STALENESS]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss to differentiate, and figures about it. The names are the same for every micro-batch."""

    loss: Tensor
    """Scalar with gradient: the sum over the tokens whose mask is True."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars that are added up and divided by the number of trained tokens, reported as `train/NAME`."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars of which the largest is reported as `train/NAME`."""


class Algorithm(Protocol):
    """See the module's docstring."""

    @property
    def needs(self) -> Needs:
        """The same for the whole job."""

    def columns(self, batch: RolloutBatch) -> Columns:
        """Numbers over the whole batch, on the CPU of rank 0, before the first optimizer step."""

    def loss(self, tokens: TokenInputs) -> TokenLoss:
        """The loss of one micro-batch, on every rank. Every token may be masked out."""


def role_logprobs(role: str) -> str:
    """The name of the column that holds the log-probs under the model of a role."""
    return f"{role}_logprobs"


def sum_where(mask: Tensor, values: Tensor) -> Tensor:
    """Sum of `values` where `mask` is True; a product would not do, since 0 * nan is nan."""
    return torch.where(mask, values, 0.0).sum()
