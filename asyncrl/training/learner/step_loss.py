"""From the log-probs of a micro-batch to its loss and its figures: the part of a step that no backend has to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.data.batch import RolloutBatch
from asyncrl.training.algorithms.losses import TokenLoss
from asyncrl.training.learner.collate import PackedTokens
from asyncrl.training.learner.tally import Tally

LossFunction = Callable[[Tensor, PackedTokens, Tensor], TokenLoss]
"""(log-probs float32 [R] with gradient, the packed tokens, mask bool [R]) -> loss."""


@dataclass(frozen=True, slots=True)
class StepLoss:
    """What an optimizer step minimises."""

    batch: RolloutBatch
    function: LossFunction
    temperature: float
    """The backend divides its logits by it."""
    compare: bool
    """Also tally |log-prob - the engine's log-prob|."""

    def __call__(self, logprobs: Tensor, entropies: Tensor, packed: PackedTokens) -> tuple[Tensor, Tensor, Tally]:
        """The loss of one micro-batch, on the device of its log-probs.

        Args:
            logprobs: float32 [R] with gradient, in the order of `packed.targets`.
            entropies: float32 [R] without gradient.

        Returns:
            The sum over trained tokens to differentiate (a scalar), their number (an int64 scalar), and the tally.
        """
        batch, device = self.batch, logprobs.device
        mask = batch.loss_mask[packed.places].to(device) & packed.counted
        result = self.function(logprobs, packed, mask)
        with torch.no_grad():
            tokens = mask.sum()
            sums = {"loss": result.loss, "tokens": tokens, "entropy": torch.where(mask, entropies, 0.0).sum()}
            maxima = dict(result.maxima)
            if self.compare:
                difference = (logprobs - batch.logprobs[packed.places].to(device)).abs()
                difference = torch.where(mask, difference, 0.0)
                sums["logprob_diff"], maxima["logprob_diff"] = difference.sum(), difference.max()
            return result.loss, tokens, Tally.of({**sums, **result.sums}, maxima)
