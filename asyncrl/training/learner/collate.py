"""Cuts micro-batches out of a RolloutBatch as packed tensors, and checks the batch before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.data.batch import RolloutBatch
from asyncrl.errors import DataError, counted
from asyncrl.training.learner.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Sequences of one forward pass, one after the other. They have T tokens, of which the policy sampled R."""

    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    tokens: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: place of each token in its sequence."""
    rows: Tensor
    """int64 [R]: the token before each sampled token, whose logits predict it."""
    targets: Tensor
    """int64 [R]: the sampled tokens."""
    places: Tensor
    """int64 [R]: where each sampled token stands in the per-token tensors of the RolloutBatch."""
    sequences: Tensor
    """int64 [R]: the sequence of each sampled token, as index into the RolloutBatch."""
    counted: bool
    """As `MicroBatch.counted`."""

    def to(self, device: torch.device) -> PackedTokens:
        """Moves the model's inputs to `device`; the indices into the RolloutBatch stay on the host."""
        return replace(
            self,
            tokens=send(self.tokens, device),
            positions=send(self.positions, device),
            rows=send(self.rows, device),
            targets=send(self.targets, device),
        )

    def padded(self, multiple: int) -> PackedTokens:
        """Appends a sequence of padding where the tokens are no multiple; nothing in it is sampled."""
        missing = -len(self.tokens) % multiple
        if not missing:
            return self
        return replace(
            self,
            lengths=(*self.lengths, missing),
            tokens=F.pad(self.tokens, (0, missing)),
            positions=F.pad(self.positions, (0, missing)),
        )


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Puts a host tensor on `device` without waiting for the work that the device has before it.

    A copy out of pageable memory waits for all of it; one out of page-locked memory queues like any other work.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def pack_tokens(batch: RolloutBatch, micro_batch: MicroBatch) -> PackedTokens:
    """Packs the sequences of `micro_batch`, in its order."""
    index = torch.tensor(micro_batch.sequences, dtype=torch.int64)
    lengths = batch.sequence_lengths[index]
    places = _ranges(_starts(batch.sequence_lengths)[index], lengths)
    tokens = batch.tokens[places]
    sampled = batch.sampled[places].nonzero().flatten()
    return PackedTokens(
        lengths=tuple(lengths.tolist()),
        tokens=tokens,
        positions=torch.arange(len(tokens)) - _starts(lengths).repeat_interleave(lengths),
        rows=sampled - 1,
        targets=tokens[sampled],
        places=places[sampled],
        sequences=index.repeat_interleave(lengths)[sampled],
        counted=micro_batch.counted,
    )


def load_packed(
    batch: RolloutBatch, micro_batches: Iterable[MicroBatch], device: torch.device
) -> Iterator[PackedTokens]:
    """Packs each micro-batch when its turn comes, and moves the model's inputs to `device`."""
    for micro_batch in micro_batches:
        yield pack_tokens(batch, micro_batch).to(device)


def trained_sequences(batch: RolloutBatch) -> list[bool]:
    """Whether each sequence has a token that the loss mask keeps."""
    sequences = torch.arange(batch.num_sequences).repeat_interleave(batch.sequence_lengths)
    return (torch.bincount(sequences[batch.loss_mask], minlength=batch.num_sequences) > 0).tolist()


def check_batch(batch: RolloutBatch, vocab_size: int) -> None:
    """Raises DataError for a batch that would silently train on nonsense: foreign ids, empty prompts, wrong lengths."""
    where = f"rollout {batch.rollout_id}"
    tokens = len(batch.tokens)
    if int(batch.sequence_lengths.sum()) != tokens or bool((batch.sequence_lengths < 0).any()):
        raise DataError(f"{where}: sequence lengths do not add up to the {tokens} tokens")
    per_token = {"sampled": batch.sampled, "loss_mask": batch.loss_mask, "logprobs": batch.logprobs, **batch.columns}
    for name, tensor in per_token.items():
        if len(tensor) != tokens:
            raise DataError(
                f"{where}: {counted(tokens, 'token')}, but {counted(len(tensor), 'entry', 'entries')} of {name}"
            )
    if len(batch.sample_index) != batch.num_sequences or not _indexes(batch.sample_index, batch.num_samples):
        raise DataError(f"{where}: sample_index does not name one of the {batch.num_samples} samples for each sequence")
    starts = _starts(batch.sequence_lengths)[batch.sequence_lengths > 0]
    if bool((unpredicted := batch.sampled[starts]).any()):
        sample = batch.sample_ids[int(batch.token_samples[starts[unpredicted][0]])]
        raise DataError(
            f"{where}: sample {sample} has an empty prompt; its first token has nothing to be predicted from"
        )
    if bool((batch.loss_mask & ~batch.sampled).any()):
        sample = batch.sample_ids[int(batch.token_samples[batch.loss_mask & ~batch.sampled][0])]
        raise DataError(f"{where}: loss_mask of sample {sample} keeps a token that the policy did not sample")
    if tokens and not 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < vocab_size:
        worst = int(batch.tokens.max()) if int(batch.tokens.min()) >= 0 else int(batch.tokens.min())
        raise DataError(
            f"{where}: token id {worst} is outside the model's vocabulary of {vocab_size}; "
            f"tokenizer and model do not match"
        )


def _indexes(index: Tensor, size: int) -> bool:
    return not len(index) or 0 <= int(index.min()) <= int(index.max()) < size


def _starts(lengths: Tensor) -> Tensor:
    """Where each run begins when runs of `lengths` lie one after the other."""
    return lengths.cumsum(0) - lengths


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The integers [start, start + length) of each pair, one after the other."""
    return torch.arange(int(lengths.sum())) + (starts - _starts(lengths)).repeat_interleave(lengths)
