"""What moves between data source, engine client and reward: prompts, turns, sequences, samples, groups.

A *turn* is one request to an engine: ids that the policy read, ids that it sampled. A *sequence* is one row to train:
turns of which each continues the ids of the one before. A *sample* is one attempt at a prompt: 1..n sequences under one
reward. A single answer is a sample of one sequence of one turn.

    prompt      answer   tool says   answer          one sequence of two turns
    [7 7 7]     [4 5]    [8 8]       [6 9 2]         token_ids  7 7 7 4 5 8 8 6 9 2
    context     output   context     output          sampled    . . . x x . . x x x
                                                     spans      (0.3, 3, 5) (0.3, 7, 8) (0.4, 8, 10)

The second answer was begun by weights 0.3 and finished by weights 0.4. Had the program edited the history before its
second request, the request would not continue the first turn: it would begin a second sequence of the same sample.

Invariants
- Token ids and log-probs are kept exactly as sampled; nothing is ever tokenised again.
- A group is known by `group_id`, a sample by `sample_id`; never by position or text.
- Everything here is frozen and free of torch. Records that exist once per sample or more often are msgspec Structs:
  these are made ten times as fast as frozen dataclasses, and the garbage collector never visits them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, tokenised."""

    prompt_id: str
    """Stable name: epoch-independent, unique in the source (for example `train.jsonl:17`)."""
    text: str
    """The rendered prompt as text."""
    token_ids: NDArray[np.int32]
    """Token ids, int32 [tokens]."""
    answer: str | None = None
    """Reference answer for the reward, where there is one."""
    record: dict[str, Any] = field(default_factory=dict)
    """The source's own fields, for rewards that need more."""


class VersionSpan(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, end) were made by weights `version` (`attempt.step`). Counted in the tokens of its owner."""

    version: str
    start: int
    end: int

    def moved(self, tokens: int) -> VersionSpan:
        """The same span where `tokens` tokens stand before those that it was counted in."""
        return VersionSpan(self.version, self.start + tokens, self.end + tokens) if tokens else self


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One request to an engine, as part of a sequence."""

    context_ids: NDArray[np.int32]
    """int32 [context tokens]: what the policy read since the turn before; the whole prompt in the first turn."""
    output_ids: NDArray[np.int32]
    """int32 [output tokens]: what it sampled, including the stop token where one was sampled."""
    logprobs: NDArray[np.float32]
    """float32 [output tokens]: log softmax(logits / temperature) of each sampled token."""
    versions: tuple[VersionSpan, ...]
    """Which weights made which output tokens."""


class TokenSequence(msgspec.Struct, frozen=True, gc=False):
    """One row to train: turns, each of which continues all tokens of the one before."""

    turns: tuple[Turn, ...]
    """At least one."""

    def __len__(self) -> int:
        """Tokens of all turns, context and output."""
        return sum(len(turn.context_ids) + len(turn.output_ids) for turn in self.turns)

    def spans(self) -> tuple[VersionSpan, ...]:
        """Which weights made which tokens, counted over all tokens of the sequence; context is in no span."""
        spans: list[VersionSpan] = []
        before = 0
        for turn in self.turns:
            before += len(turn.context_ids)
            spans += [span.moved(before) for span in turn.versions]
            before += len(turn.output_ids)
        return tuple(spans)


_NO_IDS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One attempt at a prompt, as the engine sampled it.

    `prompt_ids`, `output_ids`, `logprobs` and `versions` are views for rewards and figures. Where a sample has several
    turns, the last three join what was sampled in all of them and leave the context between them out.
    """

    sample_id: str
    group_id: str
    sequences: tuple[TokenSequence, ...]
    """Rows to train; none where generation failed."""
    finish_reason: FinishReason
    """Of the last turn."""
    text: str
    """The response decoded, without end tokens; what a reward reads."""
    reward: float | None = None
    """None until scored, and where scoring failed."""
    failure: str | None = None
    """Why there is no usable sample or reward (for example `reward timeout after 30 s`)."""

    @classmethod
    def of_turn(
        cls,
        sample_id: str,
        group_id: str,
        turn: Turn,
        *,
        finish_reason: FinishReason,
        text: str,
        reward: float | None = None,
    ) -> Sample:
        """A sample of one sequence of one turn."""
        return cls(sample_id, group_id, (TokenSequence((turn,)),), finish_reason, text, reward)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Turns of all sequences, in order."""
        if len(self.sequences) == 1:
            return self.sequences[0].turns
        return tuple(turn for sequence in self.sequences for turn in sequence.turns)

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """int32 [prompt tokens]: the context of the first turn."""
        return self.sequences[0].turns[0].context_ids if self.sequences else _NO_IDS

    @property
    def output_ids(self) -> NDArray[np.int32]:
        """int32 [sampled tokens]."""
        turns = self.turns
        return (
            turns[0].output_ids if len(turns) == 1 else np.concatenate([_NO_IDS, *(turn.output_ids for turn in turns)])
        )

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """float32 [sampled tokens]."""
        turns = self.turns
        return (
            turns[0].logprobs if len(turns) == 1 else np.concatenate([_NO_LOGPROBS, *(turn.logprobs for turn in turns)])
        )

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Which weights made which of the sampled tokens."""
        turns = self.turns
        if len(turns) == 1:
            return turns[0].versions
        spans: list[VersionSpan] = []
        before = 0
        for turn in turns:
            spans += [span.moved(before) for span in turn.versions]
            before += len(turn.output_ids)
        return tuple(spans)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """All samples of one prompt: the unit that is admitted, trained, filtered or dropped."""

    group_id: str
    prompt: Prompt
    samples: tuple[Sample, ...]
