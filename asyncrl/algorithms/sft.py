"""SFT: cross entropy of the target tokens, whatever their rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.algorithms.algorithm import Columns, Needs, TokenInputs, TokenLoss, sum_where
from asyncrl.data.batch import RolloutBatch


@dataclass(frozen=True)
class Sft:
    """Minus the log-prob of each token, at temperature 1."""

    needs: ClassVar[Needs] = Needs(engine_logprobs=False)

    def columns(self, batch: RolloutBatch) -> Columns:
        """None."""
        return Columns()

    def loss(self, tokens: TokenInputs) -> TokenLoss:
        """No further figures."""
        return TokenLoss(sum_where(tokens.mask, -tokens.logprobs))
