"""RolloutBatch: the training batch that the executor hands to the trainer, as flat tensors.

Sequences are packed, not padded. A batch has N samples, S sequences and T tokens. Sequence i owns `sequence_lengths[i]`
consecutive entries of every [T] tensor and belongs to sample `sample_index[i]`.

A worked example: sample 0 has one turn, sample 1 has one sequence of two turns and one of one turn.

    tokens            7 7 4 5 | 7 7 6 8 9 | 3 3 2
    sampled           . . x x | . . x . x | . . x       the policy made these tokens
    loss_mask         . . x x | . . x . x | . . .       a loss may train these tokens; here a filter removed the last
    sequence_lengths  4 5 3
    sample_index      0 1 1
    rewards           1.0 0.0                           one for each sample

Invariants
- The first token of a sequence is never sampled: no earlier token could predict it.
- `loss_mask` is a subset of `sampled`; `logprobs` is 0 where nothing was sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from asyncrl.data.sample import Sample, SampleGroup, VersionSpan


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """One training batch."""

    rollout_id: int
    """Number of the batch in the job, from 0. Its first optimizer step starts from weights of step `rollout_id`."""
    tokens: Tensor
    """int64 [T]: context and sampled tokens of each sequence, one sequence after the other."""
    sequence_lengths: Tensor
    """int64 [S]."""
    sample_index: Tensor
    """int64 [S]: index into `sample_ids`; sequences of one sample need not be adjacent."""
    sampled: Tensor
    """bool [T]: True where the policy sampled the token, False for context."""
    logprobs: Tensor
    """float32 [T]: the engine's log-prob of each sampled token, at the sampling temperature; 0 for context."""
    loss_mask: Tensor
    """bool [T]: True where a loss may train the token."""
    rewards: Tensor
    """float32 [N]."""
    group_index: Tensor
    """int64 [N]: index into `group_ids`; samples of one group need not be adjacent."""
    group_ids: tuple[str, ...]
    """Ids of the prompt groups, each once."""
    sample_ids: tuple[str, ...]
    """[N] ids of the samples, in order."""
    truncated: Tensor
    """bool [N]: True where `max_new_tokens` ended the sample."""
    versions: tuple[tuple[VersionSpan, ...], ...]
    """[S] spans per sequence: which weights made which tokens. Indices count all tokens of the sequence."""
    temperature: float
    """Sampling temperature of `logprobs`; the trainer divides its logits by it."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """float32 [T] by name: further numbers for each token, which an algorithm computes over the whole batch."""

    @property
    def num_samples(self) -> int:
        """N: samples in the batch."""
        return len(self.sample_ids)

    @property
    def num_sequences(self) -> int:
        """S: sequences in the batch."""
        return len(self.sequence_lengths)

    @property
    def sampled_lengths(self) -> Tensor:
        """int64 [S]: number of sampled tokens in each sequence."""
        before = torch.cat([torch.zeros(1, dtype=torch.int64), self.sampled.cumsum(0)])
        ends = self.sequence_lengths.cumsum(0)
        return before[ends] - before[ends - self.sequence_lengths]

    @property
    def token_samples(self) -> Tensor:
        """int64 [T]: index of the sample that each token belongs to."""
        return self.sample_index.repeat_interleave(self.sequence_lengths)

    @property
    def sequence_groups(self) -> Tensor:
        """int64 [S]: index of the group that each sequence belongs to."""
        return self.group_index[self.sample_index]

    @classmethod
    def from_groups(cls, rollout_id: int, groups: Sequence[SampleGroup], temperature: float) -> RolloutBatch:
        """Packs the samples of `groups` that have a reward; leaves out the others."""
        samples: list[Sample] = []
        group_index: list[int] = []
        for i, group in enumerate(groups):
            scored = [sample for sample in group.samples if sample.reward is not None]
            samples += scored
            group_index += [i] * len(scored)
        sequences = [sequence for sample in samples for sequence in sample.sequences]
        turns = [turn for sequence in sequences for turn in sequence.turns]
        lengths = np.array([(len(turn.context_ids), len(turn.output_ids)) for turn in turns], np.int64).reshape(-1, 2)
        sampled = np.repeat(np.tile([False, True], len(turns)), lengths.reshape(-1))
        logprobs = np.zeros(len(sampled), np.float32)
        tokens = np.empty(len(sampled), np.int64)
        if turns:
            np.concatenate([ids for turn in turns for ids in (turn.context_ids, turn.output_ids)], out=tokens)
            logprobs[sampled] = np.concatenate([turn.logprobs for turn in turns])
        return cls(
            rollout_id=rollout_id,
            tokens=torch.from_numpy(tokens),
            sequence_lengths=torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64),
            sample_index=torch.tensor(
                [i for i, sample in enumerate(samples) for _ in sample.sequences], dtype=torch.int64
            ),
            sampled=torch.from_numpy(sampled),
            logprobs=torch.from_numpy(logprobs),
            loss_mask=torch.from_numpy(sampled.copy()),
            rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
            group_index=torch.tensor(group_index, dtype=torch.int64),
            group_ids=tuple(group.group_id for group in groups),
            sample_ids=tuple(sample.sample_id for sample in samples),
            truncated=torch.tensor([sample.finish_reason == "length" for sample in samples], dtype=torch.bool),
            versions=tuple(sequence.spans() for sequence in sequences),
            temperature=temperature,
        )
