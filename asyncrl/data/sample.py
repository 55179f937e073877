"""The records that move between data source, engine client and reward: prompts, turns, sequences, samples, groups.

A *turn* is one request to an engine: the ids that the policy read and the ids that it sampled. A *sequence* is one row
to train: turns, each of which continues the ids of the turn before. A *sample* is one attempt at a prompt: 1..n
sequences under one reward. A single answer is a sample of one sequence of one turn.

    prompt      answer   tool says   answer          one sequence of two turns
    [7 7 7]     [4 5]    [8 8]       [6 9 2]         token_ids  7 7 7 4 5 8 8 6 9 2
    context     output   context     output          sampled    . . . x x . . x x x
                                                     spans      (0.3, 3, 5) (0.3, 7, 8) (0.4, 8, 10)

Weights 0.3 began the second answer and weights 0.4 finished it. If the program edits the history before its second
request, that request does not continue the first turn. It begins a second sequence of the same sample.

Invariants
- Token ids and log-probs stay exactly as sampled. No text is tokenised again.
- `group_id` identifies a group and `sample_id` a sample; position and text never do.
- All records are frozen and free of torch. Records that exist once per sample or more often are msgspec Structs:
  Python creates them ten times as fast as frozen dataclasses, and the garbage collector never visits them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort"]
"""Why a turn ended: a stop token, `max_new_tokens`, or the engine gave it up."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, tokenised."""

    prompt_id: str
    """Stable name, the same in all epochs and unique in the source (for example `train.jsonl:17`)."""
    text: str
    """The rendered prompt as text."""
    token_ids: NDArray[np.int32]
    """Token ids, int32 [tokens]."""
    answer: str | None = None
    """Reference answer for the reward, if there is one."""
    record: dict[str, Any] = field(default_factory=dict)
    """All fields of the source's record, for rewards that need more than the answer."""


class VersionSpan(msgspec.Struct, frozen=True, gc=False):
    """Weights `version` (`attempt.step`) made tokens [start, end) of the turn, sequence or sample that has the span."""

    version: str
    start: int
    end: int

    def moved(self, tokens: int) -> VersionSpan:
        """Returns the span shifted by `tokens`, for an owner that has so many more tokens in front."""
        return VersionSpan(self.version, self.start + tokens, self.end + tokens) if tokens else self


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One request to an engine, as part of a sequence."""

    context_ids: NDArray[np.int32]
    """int32 [context tokens]: what the policy read since the previous turn; in the first turn, the whole prompt."""
    output_ids: NDArray[np.int32]
    """int32 [output tokens]: what the policy sampled, including the stop token if it sampled one."""
    logprobs: NDArray[np.float32]
    """float32 [output tokens]: log softmax(logits / temperature) of each sampled token."""
    versions: tuple[VersionSpan, ...]
    """Which weights made which output tokens."""


class TokenSequence(msgspec.Struct, frozen=True, gc=False):
    """One row to train: turns, each of which continues all tokens of the turns before."""

    turns: tuple[Turn, ...]
    """At least one."""

    def __len__(self) -> int:
        """Number of tokens in all turns, context and output."""
        return sum(len(turn.context_ids) + len(turn.output_ids) for turn in self.turns)

    def spans(self) -> tuple[VersionSpan, ...]:
        """Which weights made which tokens. Indices count all tokens of the sequence; no span covers context."""
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

    `prompt_ids`, `output_ids`, `logprobs` and `versions` are views for rewards and metrics. For a sample of several
    turns, the last three join the sampled tokens of all turns and leave out the context between them.
    """

    sample_id: str
    """Unique in the job: `group.index`."""
    group_id: str
    """Group that the sample belongs to."""
    sequences: tuple[TokenSequence, ...]
    """Rows to train; empty if generation failed."""
    finish_reason: FinishReason
    """Why the last turn ended."""
    text: str
    """The decoded response, without the end token that stopped it; rewards read it. Other special tokens (`<think>`)
    are text."""
    reward: float | None = None
    """None until the sample is scored, and if scoring failed."""
    failure: str | None = None
    """Why generation or scoring failed (for example `reward timeout after 30 s`); None if they did not."""
    reward_parts: dict[str, float] = {}
    """Named numbers that the reward function returned beside the reward, or whose sum it is."""

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
        """Makes a sample of one sequence of one turn."""
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
        """int32 [sampled tokens]: the output of all turns."""
        turns = self.turns
        return (
            turns[0].output_ids if len(turns) == 1 else np.concatenate([_NO_IDS, *(turn.output_ids for turn in turns)])
        )

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """float32 [sampled tokens]: the log-prob of each of `output_ids`."""
        turns = self.turns
        return (
            turns[0].logprobs if len(turns) == 1 else np.concatenate([_NO_LOGPROBS, *(turn.logprobs for turn in turns)])
        )

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Which weights made which of `output_ids`."""
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
    """All samples of one prompt: the unit that the executor admits, delivers, filters or drops."""

    group_id: str
    """Unique in the job."""
    prompt: Prompt
    samples: tuple[Sample, ...]
    """All of them, also those that failed."""
