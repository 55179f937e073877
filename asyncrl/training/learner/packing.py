"""Which rank computes which sequences in which forward pass. Pure; every rank comes to the same plan.

Invariants
- In a pass over a batch, every sequence with a trained token is in exactly one micro-batch of exactly one data-parallel
  rank of one optimizer step. Further passes repeat the same plans.
- A prompt group is in one optimizer step only, since its advantages are relative to each other.
- Every data-parallel rank has at least one micro-batch per step, since gradients are reduced collectively. A rank
  without sequences of its own runs the step's shortest one uncounted.
- Ranks may run different numbers of micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences of one forward pass, longest first."""

    sequences: tuple[int, ...]
    """Indices into the batch."""
    counted: bool = True
    """False: the rank computes it only to take part; it adds nothing to loss, gradient or metrics."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step: the micro-batches of each data-parallel rank."""

    ranks: tuple[tuple[MicroBatch, ...], ...]

    @property
    def sequences(self) -> tuple[int, ...]:
        """All sequences that count, in no particular order."""
        return tuple(
            i for rank in self.ranks for micro_batch in rank if micro_batch.counted for i in micro_batch.sequences
        )


def plan_steps(
    lengths: Sequence[int],
    group_index: Sequence[int],
    trained: Sequence[bool],
    *,
    data_parallel: int,
    max_tokens: int,
    minibatches: int = 1,
) -> tuple[StepPlan, ...]:
    """Plans the optimizer steps of one pass over a batch.

    Args:
        lengths: tokens of each sequence.
        group_index: prompt group of each sequence.
        trained: whether a sequence has any token to train on; the others are left out.
        data_parallel: copies of the model.
        max_tokens: budget of a micro-batch; a longer sequence gets a micro-batch of its own.
        minibatches: optimizer steps; fewer where there are fewer groups.

    Returns:
        At most `minibatches` plans, none of them empty; () where nothing is trained.
    """
    groups = sorted({g for g, keep in zip(group_index, trained, strict=True) if keep})
    steps = min(minibatches, len(groups))
    step_of = {group: position * steps // len(groups) for position, group in enumerate(groups)}
    plans = []
    for step in range(steps):
        sequences = [i for i, group in enumerate(group_index) if trained[i] and step_of[group] == step]
        shards = split_evenly(sequences, lengths, data_parallel)
        spare = MicroBatch((min(sequences, key=lambda i: lengths[i]),), counted=False)
        plans.append(StepPlan(tuple(pack(shard, lengths, max_tokens) or (spare,) for shard in shards)))
    return tuple(plans)


def split_evenly(sequences: Sequence[int], lengths: Sequence[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """Splits `sequences` into `parts` of about equal tokens: longest first, each to the part with the fewest so far."""
    shards: list[list[int]] = [[] for _ in range(parts)]
    load = [(0, part) for part in range(parts)]
    for sequence in sorted(sequences, key=lambda i: (-lengths[i], i)):
        tokens, part = heapq.heappop(load)
        shards[part].append(sequence)
        heapq.heappush(load, (tokens + lengths[sequence], part))
    return tuple(tuple(shard) for shard in shards)


def pack(sequences: Sequence[int], lengths: Sequence[int], max_tokens: int) -> tuple[MicroBatch, ...]:
    """Cuts `sequences` into runs of at most `max_tokens`, sorted by length: equal neighbours waste least."""
    micro_batches: list[MicroBatch] = []
    current: list[int] = []
    tokens = 0
    for sequence in sorted(sequences, key=lambda i: (-lengths[i], i)):
        if current and tokens + lengths[sequence] > max_tokens:
            micro_batches.append(MicroBatch(tuple(current)))
            current, tokens = [], 0
        current.append(sequence)
        tokens += lengths[sequence]
    if current:
        micro_batches.append(MicroBatch(tuple(current)))
    return tuple(micro_batches)


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """Consecutive sequences of a packed micro-batch, for which attention is one padded batch."""

    start: int
    """First token of the run."""
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all its sequences, without padding."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(self.lengths)


_PADDING_PER_TOKEN = 0.25
"""Most padding per real token in a run: beyond it, another kernel call is cheaper than the wasted arithmetic."""
_PADDING_FREE = 256
"""So many padding tokens are always cheaper than another kernel call."""


def attention_runs(lengths: Sequence[int]) -> tuple[AttentionRun, ...]:
    """Cuts packed sequences, in order, into runs with little padding; sorted lengths give the fewest runs."""
    runs: list[AttentionRun] = []
    start = first = tokens = longest = 0
    for i, length in enumerate(lengths):
        padding = max(longest, length) * (i + 1 - first) - (tokens + length)
        if i > first and padding > _PADDING_PER_TOKEN * (tokens + length) + _PADDING_FREE:
            runs.append(AttentionRun(start, tuple(lengths[first:i])))
            start, first, tokens, longest = start + tokens, i, 0, 0
        tokens, longest = tokens + length, max(longest, length)
    if tokens:
        runs.append(AttentionRun(start, tuple(lengths[first:])))
    return tuple(runs)
