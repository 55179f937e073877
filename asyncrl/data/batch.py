"""RolloutBatch: what the executor hands to the trainer, as flat tensors.

Sequences are packed, not padded: with N samples, T tokens (prompts and responses) and R response
tokens, sample i owns `sequence_lengths[i]` consecutive entries of `tokens`, of which the first
`prompt_lengths[i]` are the prompt, and the matching run of the [R] tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.data.sample import Sample, SampleGroup, VersionSpan


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """One training batch."""

    rollout_id: int
    tokens: Tensor
    """int64 [T]: prompt then response of each sample, one after the other."""
    sequence_lengths: Tensor
    """int64 [N]: prompt + response."""
    prompt_lengths: Tensor
    """int64 [N]."""
    logprobs: Tensor
    """float32 [R]: the engine's log-prob of each response token, at the sampling temperature."""
    loss_mask: Tensor
    """bool [R]: False for a token that must not be trained on."""
    rewards: Tensor
    """float32 [N]."""
    group_index: Tensor
    """int64 [N]: index into `group_ids`; samples of one group need not be adjacent."""
    group_ids: tuple[str, ...]
    sample_ids: tuple[str, ...]
    truncated: Tensor
    """bool [N]: ended by max_new_tokens."""
    versions: tuple[tuple[VersionSpan, ...], ...]
    """Per sample, which weights made which response tokens."""
    temperature: float
    """Sampling temperature of `logprobs`; the trainer divides its logits by it."""

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    @property
    def response_lengths(self) -> Tensor:
        """int64 [N]."""
        return self.sequence_lengths - self.prompt_lengths

    @classmethod
    def from_groups(cls, rollout_id: int, groups: Sequence[SampleGroup], temperature: float) -> RolloutBatch:
        """Packs the scored samples of `groups`; one without a reward is left out, its group's other samples stay."""
        samples: list[Sample] = []
        index: list[int] = []
        for i, group in enumerate(groups):
            for sample in group.samples:
                if sample.reward is not None:
                    samples.append(sample)
                    index.append(i)
        pieces = [part for s in samples for part in (s.prompt_ids, s.output_ids)]
        tokens = np.concatenate(pieces, dtype=np.int64) if pieces else np.empty(0, np.int64)
        logprobs = (
            np.concatenate([s.logprobs for s in samples], dtype=np.float32) if samples else np.empty(0, np.float32)
        )
        return cls(
            rollout_id=rollout_id,
            tokens=torch.from_numpy(tokens),
            sequence_lengths=torch.tensor([len(s.prompt_ids) + len(s.output_ids) for s in samples], dtype=torch.int64),
            prompt_lengths=torch.tensor([len(s.prompt_ids) for s in samples], dtype=torch.int64),
            logprobs=torch.from_numpy(logprobs),
            loss_mask=torch.ones(len(logprobs), dtype=torch.bool),
            rewards=torch.tensor([s.reward for s in samples], dtype=torch.float32),
            group_index=torch.tensor(index, dtype=torch.int64),
            group_ids=tuple(g.group_id for g in groups),
            sample_ids=tuple(s.sample_id for s in samples),
            truncated=torch.tensor([s.finish_reason == "length" for s in samples], dtype=torch.bool),
            versions=tuple(s.versions for s in samples),
            temperature=temperature,
        )
