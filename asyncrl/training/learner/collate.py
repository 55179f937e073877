"""Cuts the micro-batch of a plan out of a RolloutBatch, as packed tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.data.batch import RolloutBatch
from asyncrl.errors import DataError
from asyncrl.training.learner.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Samples of one forward pass, one after the other; T tokens, of which R are response tokens."""

    lengths: tuple[int, ...]
    """Tokens of each sample."""
    tokens: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: place of each token in its sample."""
    rows: Tensor
    """int64 [R]: the token before each response token, whose logits predict it."""
    targets: Tensor
    """int64 [R]: the response tokens."""
    responses: Tensor
    """int64 [R]: where each response token stands in the [R] tensors of the RolloutBatch."""
    samples: Tensor
    """int64 [R]: the sample that each response token belongs to, as index into the RolloutBatch."""


def pack_tokens(batch: RolloutBatch, micro_batch: MicroBatch) -> PackedTokens:
    """Packs the samples of `micro_batch`, in its order."""
    index = torch.tensor(micro_batch.samples, dtype=torch.int64)
    lengths = batch.sequence_lengths[index]
    prompts = batch.prompt_lengths[index]
    responses = lengths - prompts
    starts = _starts(lengths)
    tokens = batch.tokens[_ranges(_starts(batch.sequence_lengths)[index], lengths)]
    rows = _ranges(starts + prompts - 1, responses)
    return PackedTokens(
        lengths=tuple(lengths.tolist()),
        tokens=tokens,
        positions=torch.arange(len(tokens)) - starts.repeat_interleave(lengths),
        rows=rows,
        targets=tokens[rows + 1],
        responses=_ranges(_starts(batch.response_lengths)[index], responses),
        samples=index.repeat_interleave(responses),
    )


def trained_samples(batch: RolloutBatch) -> list[bool]:
    """Whether each sample has a response token that the loss mask keeps."""
    samples = torch.arange(batch.num_samples).repeat_interleave(batch.response_lengths)
    return (torch.bincount(samples[batch.loss_mask], minlength=batch.num_samples) > 0).tolist()


def check_batch(batch: RolloutBatch, vocab_size: int) -> None:
    """Raises DataError for what would train on nonsense in silence: foreign ids, empty prompts, wrong lengths."""
    where = f"rollout {batch.rollout_id}"
    if int(batch.sequence_lengths.sum()) != len(batch.tokens) or bool((batch.response_lengths < 0).any()):
        raise DataError(f"{where}: sequence lengths do not add up to the {len(batch.tokens)} tokens")
    response_tokens = int(batch.response_lengths.sum())
    if not len(batch.logprobs) == len(batch.loss_mask) == response_tokens:
        raise DataError(
            f"{where}: {response_tokens} response tokens, but {len(batch.logprobs)} log-probs and "
            f"{len(batch.loss_mask)} mask entries"
        )
    if batch.num_samples and int(batch.prompt_lengths.min()) < 1:
        sample = batch.sample_ids[int(batch.prompt_lengths.argmin())]
        raise DataError(
            f"{where}: sample {sample} has an empty prompt; its first token has nothing to be predicted from"
        )
    if len(batch.tokens) and not 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < vocab_size:
        worst = int(batch.tokens.max()) if int(batch.tokens.min()) >= 0 else int(batch.tokens.min())
        raise DataError(
            f"{where}: token id {worst} is outside the model's vocabulary of {vocab_size}; "
            f"tokenizer and model do not match"
        )


def _starts(lengths: Tensor) -> Tensor:
    """Where each run begins when runs of `lengths` lie one after the other."""
    return lengths.cumsum(0) - lengths


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The integers [start, start + length) of each pair, one after the other."""
    return torch.arange(int(lengths.sum())) + (starts - _starts(lengths)).repeat_interleave(lengths)
