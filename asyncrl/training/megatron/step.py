"""Forward and backward over the micro-batches of one optimizer step, by Megatron's schedule.

Numbers that describe the step are summed on each rank and reduced over the data-parallel ranks once, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from asyncrl.data.batch import RolloutBatch
from asyncrl.training.algorithms.losses import TokenLoss
from asyncrl.training.learner.collate import PackedTokens, pack_tokens
from asyncrl.training.learner.logprobs import token_logprobs
from asyncrl.training.learner.packing import MicroBatch
from asyncrl.training.megatron.modules import packed_sequences

LossFunction = Callable[[Tensor, PackedTokens, Tensor], TokenLoss]
"""(log-probs float32 [R] with gradient, the packed tokens, mask bool [R]) -> loss."""


@dataclass(slots=True)
class Tally:
    """Sums and maxima over tokens, of one rank until `reduce`d."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        for key, value in other.sums.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        for key, value in other.maxima.items():
            self.maxima[key] = max(self.maxima.get(key, value), value)

    def reduce(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Adds up over the ranks of `group`, all of which hold the same keys."""
        for values, op in ((self.sums, dist.ReduceOp.SUM), (self.maxima, dist.ReduceOp.MAX)):
            if values:
                packed = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
                dist.all_reduce(packed, op=op, group=group)
                values.update(zip(values, packed.tolist(), strict=True))

    def mean(self, key: str) -> float:
        """Per trained token."""
        return self.sums[key] / self.sums["tokens"]


def forward_backward(
    model: torch.nn.Module,
    batch: RolloutBatch,
    micro_batches: Sequence[MicroBatch],
    loss_function: LossFunction,
    *,
    temperature: float,
    vocab_size: int,
    device: torch.device,
    compare: bool,
) -> Tally:
    """Leaves the mean gradient over the trained tokens of all ranks in the buffers; returns their tally.

    Args:
        compare: also tally |log-prob - rollout log-prob|.
    """
    tensor_parallel = parallel_state.get_tensor_model_parallel_group()

    def forward_step(inputs: Iterator[tuple[MicroBatch, PackedTokens]], model: torch.nn.Module) -> tuple[Tensor, Any]:
        micro_batch, packed = next(inputs)
        logits = _forward(model, packed)

        def loss(logits: Tensor) -> tuple[Tensor, Tensor, Tally]:
            logprobs, entropies = token_logprobs(
                logits, packed.targets, temperature=temperature, vocab_size=vocab_size, group=tensor_parallel
            )
            mask = batch.loss_mask[packed.places].to(device) & micro_batch.counted
            result = loss_function(logprobs, packed, mask)
            with torch.no_grad():
                tokens = mask.sum()
                sums = {"loss": result.loss, "tokens": tokens, "entropy": torch.where(mask, entropies, 0.0).sum()}
                maxima = dict(result.maxima)
                if compare:
                    difference = (logprobs - batch.logprobs[packed.places].to(device)).abs()
                    difference = torch.where(mask, difference, 0.0)
                    sums["logprob_diff"], maxima["logprob_diff"] = difference.sum(), difference.max()
                tally = Tally(_floats({**sums, **result.sums}), _floats(maxima))
            return result.loss, tokens.int(), tally

        return logits, loss

    tallies = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=_load(batch, micro_batches, device),
        model=[model],
        num_microbatches=len(micro_batches),
        seq_length=1,  # both unused without pipeline parallelism
        micro_batch_size=1,
        forward_only=False,
    )
    total = Tally()
    for tally in tallies:
        total.add(tally)
    total.reduce(parallel_state.get_data_parallel_group(), device)
    return total


@torch.no_grad()
def forward_logprobs(
    model: torch.nn.Module,
    batch: RolloutBatch,
    micro_batches: Sequence[MicroBatch],
    *,
    vocab_size: int,
    device: torch.device,
) -> Tensor:
    """Log-probs of sampled tokens at the batch's temperature: float32 [T] on the CPU, 0 for context, same on all."""
    result = torch.zeros(len(batch.logprobs), device=device)
    for micro_batch, packed in _load(batch, micro_batches, device):
        if micro_batch.counted:
            logprobs, _ = token_logprobs(
                _forward(model, packed),
                packed.targets,
                temperature=batch.temperature,
                vocab_size=vocab_size,
                group=parallel_state.get_tensor_model_parallel_group(),
            )
            result[packed.places.to(device)] = logprobs
    dist.all_reduce(result, group=parallel_state.get_data_parallel_group())
    return result.cpu()


def _forward(model: torch.nn.Module, packed: PackedTokens) -> Tensor:
    sequences = packed_sequences(packed.lengths, packed.tokens.device)
    logits: Tensor = model(packed.tokens[None], packed.positions[None], sequences, packed.rows)
    return logits


def _load(
    batch: RolloutBatch, micro_batches: Iterable[MicroBatch], device: torch.device
) -> Iterator[tuple[MicroBatch, PackedTokens]]:
    """Packs each micro-batch in its turn; what the model reads goes to `device`, what indexes the batch stays."""
    for micro_batch in micro_batches:
        packed = pack_tokens(batch, micro_batch)
        yield (
            micro_batch,
            PackedTokens(
                lengths=packed.lengths,
                tokens=packed.tokens.to(device),
                positions=packed.positions.to(device),
                rows=packed.rows.to(device),
                targets=packed.targets.to(device),
                places=packed.places,
                samples=packed.samples,
            ),
        )


def _floats(values: dict[str, Tensor]) -> dict[str, float]:
    return dict(zip(values, torch.stack([v.double() for v in values.values()]).tolist(), strict=True)) if values else {}
