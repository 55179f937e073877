"""How the losses of tokens add up to the loss of an optimizer step, as weights of tokens.

The learner divides sums over tokens by the number of trained tokens of the optimizer step. With the weights made here
that quotient is the mean which the algorithm means. With n trained tokens, of which n_i are in sequence i of S:

    token      w = 1                 the mean over all tokens (DAPO, arXiv 2503.14476, equation 8)
    sequence   w = n / (S n_i)       the mean over sequences of their token means (GRPO, arXiv 2402.03300, equation 3)
    fixed      w = n / (S L)         sums of sequences over a constant L (Dr. GRPO, arXiv 2503.20783, section 3.1)
    group      w = n / (G n_g)       the mean over prompt groups of their token means

Only sequences and groups with a trained token count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.data.batch import RolloutBatch

Unit = Literal["token", "sequence", "fixed", "group"]


@dataclass(frozen=True, slots=True)
class Aggregation:
    """See the module's docstring."""

    unit: Unit = "token"
    length: int = 0
    """L of `fixed`, in tokens; not read otherwise."""

    def weights(self, batch: RolloutBatch, sequences: Sequence[int]) -> Tensor | None:
        """The weight of each token in the optimizer step that trains `sequences` of `batch`.

        Returns:
            float32 [T], 1 where a token is not trained in this step; None where every weight is 1.
        """
        if self.unit == "token":
            return None
        chosen = torch.zeros(batch.num_sequences, dtype=torch.bool)
        chosen[list(sequences)] = True
        owner = torch.arange(batch.num_sequences).repeat_interleave(batch.sequence_lengths)
        trained = batch.loss_mask & chosen[owner]
        unit = batch.sequence_groups[owner] if self.unit == "group" else owner
        counts = torch.bincount(unit[trained], minlength=1)
        units, tokens = int((counts > 0).sum()), int(trained.sum())
        weights = torch.ones(len(batch.tokens))
        each = torch.tensor(self.length) if self.unit == "fixed" else counts[unit[trained]]
        weights[trained] = (tokens / (max(units, 1) * each.double())).float().expand(tokens)
        return weights


TOKEN_MEAN = Aggregation()
"""The mean over all tokens."""
