"""Rollout batches with random tokens, for tests of training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.data.batch import RolloutBatch
from asyncrl.data.sample import VersionSpan


def make_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    groups: Sequence[int] | None = None,
    rewards: Sequence[float] | None = None,
    vocab_size: int = 101,
    temperature: float = 1.0,
    rollout_id: int = 0,
    logprobs: Tensor | None = None,
    loss_mask: Tensor | None = None,
) -> RolloutBatch:
    """`lengths` are (prompt, response) tokens of each sample; what is not given is random, seeded by `rollout_id`.

    `logprobs` and `loss_mask` are those of the response tokens alone. All were made by the weights before the step.
    """
    generator = torch.Generator().manual_seed(rollout_id)
    count = len(lengths)
    index = torch.tensor(groups if groups is not None else [i // 2 for i in range(count)], dtype=torch.int64)
    prompts = torch.tensor([p for p, _ in lengths], dtype=torch.int64)
    responses = torch.tensor([r for _, r in lengths], dtype=torch.int64)
    total = int(responses.sum())
    tokens = torch.randint(0, vocab_size, (int((prompts + responses).sum()),), generator=generator)
    sampled = (
        torch.tensor([False, True]).repeat(count).repeat_interleave(torch.stack([prompts, responses], 1).flatten())
    )
    all_logprobs, all_masks = torch.zeros(len(tokens)), sampled.clone()
    all_logprobs[sampled] = logprobs if logprobs is not None else -5.0 + torch.rand(total, generator=generator)
    if loss_mask is not None:
        all_masks[sampled] = loss_mask
    return RolloutBatch(
        rollout_id=rollout_id,
        tokens=tokens,
        sequence_lengths=prompts + responses,
        sample_index=torch.arange(count),
        sampled=sampled,
        logprobs=all_logprobs,
        loss_mask=all_masks,
        rewards=torch.tensor(rewards) if rewards is not None else torch.rand(count, generator=generator),
        group_index=index,
        group_ids=tuple(f"group-{g}" for g in range(int(index.max()) + 1)),
        sample_ids=tuple(f"sample-{i}" for i in range(count)),
        truncated=torch.zeros(count, dtype=torch.bool),
        versions=tuple((VersionSpan(f"0.{rollout_id}", p, p + r),) for p, r in lengths),
        temperature=temperature,
    )


def split_samples(batch: RolloutBatch) -> list[tuple[Tensor, int]]:
    """(tokens, prompt length) of each sample."""
    prompts = (batch.sequence_lengths - batch.sampled_lengths).tolist()
    return list(zip(batch.tokens.split(batch.sequence_lengths.tolist()), prompts, strict=True))
