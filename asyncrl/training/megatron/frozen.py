"""A model that is not trained: weights alone, without gradient buffers and optimizer.

Never run so far (needs a GPU): `offload` and `onload`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from asyncrl.errors import CheckpointError
from asyncrl.training.checkpoints.slices import Piece
from asyncrl.training.megatron.host_memory import HostMemory, free_cached
from asyncrl.training.megatron.model import PolicyModel
from asyncrl.training.megatron.modules import BFloat16Module
from asyncrl.training.megatron.shards import WEIGHT, Held, Read
from asyncrl.training.ranks.layout import RankLayout


class FrozenModel:
    """One rank's weights of a role that is not trained; has the part of `Optimizer` that is not about training."""

    def __init__(self, model: PolicyModel, config: TransformerConfig, layout: RankLayout) -> None:
        self._model = model.requires_grad_(False)
        self._layout = layout
        self._host = HostMemory(next(model.parameters()).device)
        self.module = BFloat16Module(config, model) if config.params_dtype == torch.bfloat16 else model
        """Computes logits."""

    def state(self) -> tuple[list[Held], dict[str, Any]]:
        """This rank's share of the weights, of which each copy of the model saves one; and no further facts."""
        copy, copies = self._layout.data_parallel_rank, self._layout.data_parallel
        held = []
        for name, value in self._model.named_parameters():
            size = value.numel()
            piece = Piece(size * copy // copies, size * (copy + 1) // copies, size)
            if piece.start < piece.stop:
                held.append(Held(name, piece, {WEIGHT: value.view(-1)[piece.start : piece.stop]}))
        return held, {}

    @torch.no_grad()
    def restore(self, facts: dict[str, Any], read: Read) -> None:
        """Sets the weights to what the `state` of all ranks gave, in whatever layout.

        Raises CheckpointError: they are not those of this model, or cannot be read.
        """
        if facts:
            raise CheckpointError("this role is frozen, and the checkpoint was written by a job that trained it")
        for name, parameter in self._model.named_parameters():
            whole = Piece(0, parameter.numel(), parameter.numel())
            parameter.copy_(read(name, WEIGHT, whole, parameter.dtype).view(parameter.shape))

    @torch.no_grad()
    def copy(self, weights: Mapping[str, Tensor]) -> None:
        """Sets the weights to those of another model of the same architecture, by parameter name."""
        for name, parameter in self._model.named_parameters():
            parameter.copy_(weights[name])

    def offload(self, *, keep_weights: bool) -> None:
        """Moves the weights to host memory unless they are kept."""
        if not keep_weights:
            self._host.take(self._model.parameters())
        free_cached()

    def onload(self) -> None:
        """Undoes `offload`."""
        self._host.give_back()
        torch.cuda.synchronize()
