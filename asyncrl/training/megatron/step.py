"""Forward and backward over the micro-batches of one optimizer step, by Megatron's schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from asyncrl.data.batch import RolloutBatch
from asyncrl.training.learner.collate import PackedTokens, load_packed, send
from asyncrl.training.learner.logprobs import token_logprobs
from asyncrl.training.learner.packing import MicroBatch
from asyncrl.training.learner.step_loss import StepLoss
from asyncrl.training.learner.tally import Figures, Tally, tally
from asyncrl.training.megatron.kernels import attention_of
from asyncrl.training.megatron.modules import packed_sequences


def forward_backward(
    model: torch.nn.Module,
    batch: RolloutBatch,
    micro_batches: Sequence[MicroBatch],
    loss: StepLoss,
    *,
    vocab_size: int,
    device: torch.device,
) -> Tally:
    """Leaves the mean gradient over the trained tokens of all ranks in the buffers; returns their tally."""

    def forward_step(inputs: Iterator[PackedTokens], model: torch.nn.Module) -> tuple[Tensor, Any]:
        packed = next(inputs)
        logits = _forward(model, packed, device)

        def loss_of(logits: Tensor) -> tuple[Tensor, Tensor, Figures]:
            logprobs, entropies = token_logprobs(
                logits,
                packed.targets,
                temperature=loss.temperature,
                vocab_size=vocab_size,
                group=parallel_state.get_tensor_model_parallel_group(),
                entropy_gradient=loss.entropy_gradient,
            )
            value, tokens, figures = loss(logprobs, entropies, packed)
            return value, tokens.int(), figures

        return logits, loss_of

    figures = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=load_packed(batch, micro_batches, device),
        model=[model],
        num_microbatches=len(micro_batches),
        seq_length=1,  # both unused without pipeline parallelism
        micro_batch_size=1,
        forward_only=False,
    )
    return tally(figures, parallel_state.get_data_parallel_group())


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
    for packed in load_packed(batch, micro_batches, device):
        if packed.counted:
            logprobs, _ = token_logprobs(
                _forward(model, packed, device),
                packed.targets,
                temperature=batch.temperature,
                vocab_size=vocab_size,
                group=parallel_state.get_tensor_model_parallel_group(),
            )
            result[send(packed.places, device)] = logprobs
    dist.all_reduce(result, group=parallel_state.get_data_parallel_group())
    return result.cpu()


def _forward(model: torch.nn.Module, packed: PackedTokens, device: torch.device) -> Tensor:
    packed = packed.padded(parallel_state.get_tensor_model_parallel_world_size())  # which cut the tokens among them
    config = get_model_config(model)
    attention = attention_of(device, config.params_dtype, config.kv_channels)
    sequences = packed_sequences(packed.lengths, device, attention, fused_rope=config.apply_rope_fusion)
    logits: Tensor = model(packed.tokens[None], packed.positions[None], sequences, packed.rows)
    return logits
