"""From the requests of a session to the sequences of its sample. Pure.

The rule: a request whose ids begin with all ids of a sequence (context and sampled tokens) extends it, as a further
turn; the ids in between are context. Any other request begins a further sequence of the same sample: the program has
edited or shortened the history, or rendered it in another way. Where several sequences could be extended, the longest
one is; among equals, the latest.

    request            answer    sequences
    7 7 7              4 5       [7 7 7 | 4 5]
    7 7 7 4 5 8 8      6 9       [7 7 7 | 4 5] [8 8 | 6 9]        it begins with 7 7 7 4 5: a second turn
    7 7 9              3         … and [7 7 9 | 3]                it does not: a second sequence

Invariant: the sampled tokens of all sequences, with their log-probs and versions, are those of all answers, each once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.data.sample import TokenSequence, Turn
from asyncrl.rollout.requests.wire import Generation


class Exchange(msgspec.Struct, frozen=True, gc=False):
    """One request of a session and its answer, token by token."""

    input_ids: NDArray[np.int32]
    """int32 [tokens], as sent."""
    generation: Generation

    def __len__(self) -> int:
        """Tokens sent and sampled: all that the sequence has after this exchange."""
        return len(self.input_ids) + len(self.generation.output_ids)

    def continues(self, earlier: Exchange) -> bool:
        """Whether the ids as sent begin with all tokens of `earlier`."""
        sent, whole = len(earlier.input_ids), len(earlier)
        return np.array_equal(self.input_ids[:sent], earlier.input_ids) and np.array_equal(
            self.input_ids[sent:whole], earlier.generation.output_ids
        )

    def turn(self, before: int) -> Turn:
        """As a turn of a sequence that has `before` tokens."""
        made = self.generation
        context = self.input_ids[before:] if before else self.input_ids
        return Turn(context, made.output_ids, made.logprobs, made.versions)


def sequences_of(exchanges: Sequence[Exchange]) -> tuple[TokenSequence, ...]:
    """The sequences of these exchanges, in the order in which they began; see the module's docstring."""
    if len(exchanges) == 1:  # nearly always, and for every sample
        return (TokenSequence((exchanges[0].turn(0),)),)
    rows: list[list[Exchange]] = []
    for exchange in exchanges:
        extended = [row for row in reversed(rows) if exchange.continues(row[-1])]
        if extended:
            max(extended, key=lambda row: len(row[-1])).append(exchange)
        else:
            rows.append([exchange])
    return tuple(TokenSequence(tuple(map(Exchange.turn, row, _lengths_before(row)))) for row in rows)


def _lengths_before(row: list[Exchange]) -> list[int]:
    """Tokens of the sequence before each of its exchanges."""
    return [0, *(len(exchange) for exchange in row[:-1])]
