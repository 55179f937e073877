"""What moves between data source, engine client and reward: prompts, samples, groups.

Invariants
- Token ids and log-probs are kept exactly as sampled; nothing is ever tokenised again.
- A group is known by `group_id`, a sample by `sample_id`; never by position or text.
- Everything here is frozen and free of torch. What there is one of per sample or more is a msgspec Struct, as those
  are made ten times as fast as frozen dataclasses, and one that the garbage collector never visits.
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
    """Tokens [start, end) of a response were made by weights `version` (`attempt.step`)."""

    version: str
    start: int
    end: int


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One response as the engine sampled it."""

    sample_id: str
    group_id: str
    prompt_ids: NDArray[np.int32]
    """int32 [prompt tokens]."""
    output_ids: NDArray[np.int32]
    """int32 [response tokens], including the stop token where one was sampled."""
    logprobs: NDArray[np.float32]
    """float32 [response tokens]: log softmax(logits / temperature) of each sampled token."""
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    text: str
    """The response decoded, without end tokens; what a reward reads."""
    reward: float | None = None
    """None until scored, and where scoring failed."""
    failure: str | None = None
    """Why there is no usable sample or reward (for example `reward timeout after 30 s`)."""


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """All samples of one prompt: the unit that is admitted, trained, filtered or dropped."""

    group_id: str
    prompt: Prompt
    samples: tuple[Sample, ...]
