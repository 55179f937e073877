"""From the log-probs of a micro-batch to its loss and its figures: the part of a step that no backend has to know."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.algorithm import TokenInputs, sum_where
from asyncrl.algorithms.chosen import ChosenAlgorithm, token_staleness
from asyncrl.data.batch import RolloutBatch
from asyncrl.training.learner.collate import PackedTokens, send
from asyncrl.training.learner.tally import Figures

AGREEMENT = "logprob_diff"
"""Figure of tokens made by the weights that the trainer holds: here trainer and engine compute the same."""
MOVED = "policy_moved"
"""Figure of tokens made by older weights."""
MISMATCH = "mismatch_k3"
"""Figure of all tokens: how far the trainer's policy is from the one that sampled them."""
TOKENS = "_tokens"
"""Behind a figure: over how many tokens it is."""


@dataclass(frozen=True, slots=True)
class StepLoss:
    """What an optimizer step minimises."""

    batch: RolloutBatch
    algorithm: ChosenAlgorithm
    current: Tensor | None
    """bool [T]: True for tokens that were made by the very weights that the trainer holds. Then the loss also tallies
    |log-prob - the engine's log-prob|, of these tokens and of the others apart. None: no engine made the tokens, or the
    weights have moved since the batch was begun."""
    weights: Tensor | None = None
    """float32 [T]: `TokenInputs.weights` of this optimizer step; None where all are 1."""

    @property
    def temperature(self) -> float:
        """The backend divides its logits by it."""
        return self.batch.temperature if self.algorithm.needs.engine_logprobs else 1.0

    @property
    def entropy_gradient(self) -> bool:
        """The backend computes entropies with gradient."""
        return self.algorithm.needs.entropy_gradient

    def __call__(self, logprobs: Tensor, entropies: Tensor, packed: PackedTokens) -> tuple[Tensor, Tensor, Figures]:
        """The loss of one micro-batch, on the device of its log-probs.

        Args:
            logprobs: float32 [R] with gradient, in the order of `packed.targets`.
            entropies: float32 [R], with gradient where `entropy_gradient` asks for it.

        Returns:
            The sum over trained tokens to differentiate (a scalar), their number (an int64 scalar), and the figures.

        Raises:
            AlgorithmError: the algorithm failed, or returned what cannot be trained on.
        """
        tokens = self._inputs(logprobs, entropies, packed)
        result = self.algorithm.loss(tokens)
        with torch.no_grad():
            count = tokens.mask.sum()
            entropy = torch.where(tokens.mask, entropies, 0.0).sum()
            sums, maxima = {"loss": result.loss, "tokens": count, "entropy": entropy}, dict(result.maxima)
            if self.current is not None:
                current = send(self.current[packed.places], logprobs.device)
                apart = logprobs - tokens.engine_logprobs
                sums[MISMATCH] = sum_where(tokens.mask, apart.exp() - 1 - apart)
                sums[MISMATCH + TOKENS] = count
                difference = apart.abs()
                for name, where in ((AGREEMENT, tokens.mask & current), (MOVED, tokens.mask & ~current)):
                    counted = torch.where(where, difference, 0.0)
                    sums[name], sums[name + TOKENS], maxima[name] = counted.sum(), where.sum(), counted.max()
            return result.loss, count, Figures.of({**sums, **result.sums}, maxima)

    def _inputs(self, logprobs: Tensor, entropies: Tensor, packed: PackedTokens) -> TokenInputs:
        batch, places, device = self.batch, packed.places, logprobs.device
        samples = batch.sample_index[packed.sequences]
        return TokenInputs(
            logprobs=logprobs,
            entropies=entropies,
            engine_logprobs=send(batch.logprobs[places], device),
            mask=send(batch.loss_mask[places], device) & packed.counted,
            columns={name: send(column[places], device) for name, column in batch.columns.items()},
            sequence=send(packed.sequences, device),
            sample=send(samples, device),
            group=send(batch.group_index[samples], device),
            weights=torch.ones_like(logprobs, requires_grad=False)
            if self.weights is None
            else send(self.weights[places], device),
            num_sequences=batch.num_sequences,
        )


def made_by_current_weights(batch: RolloutBatch, *, keeps_kv: bool) -> Tensor:
    """bool [T]: True for tokens that were made by the weights before the step of the batch.

    With `keeps_kv` (weights.on_update = "in_place") an engine goes on with KV of older weights. Then no token counts
    that follows one of other weights in its sequence.
    """
    current = token_staleness(batch) == 0
    if keeps_kv:
        sequence = torch.arange(batch.num_sequences).repeat_interleave(batch.sequence_lengths)
        mixed = sequence[batch.sampled & ~current]
        current &= ~torch.isin(sequence, mixed)
    return current
