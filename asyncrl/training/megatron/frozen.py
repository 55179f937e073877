"""A model that is not trained: weights alone, without gradient buffers and optimizer.

Never run so far (needs a GPU): `offload` and `onload`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from asyncrl.training.megatron.host_memory import HostMemory, free_cached
from asyncrl.training.megatron.model import PolicyModel
from asyncrl.training.megatron.optimizer import fitting


class FrozenModel:
    """One rank's weights of a role that is not trained; has the part of `Optimizer` that is not about training."""

    def __init__(self, model: PolicyModel, config: TransformerConfig) -> None:
        self._model = model.requires_grad_(False)
        self._host = HostMemory(next(model.parameters()).device)
        self.module = Float16Module(config, model) if config.params_dtype == torch.bfloat16 else model
        """Computes logits."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """This rank's part of the weights by parameter name: copies in host memory, and no further facts."""
        return {name: value.detach().to("cpu", copy=True) for name, value in self._model.named_parameters()}, {}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Sets the weights to what `state` gave on the same rank of the same layout.

        Raises CheckpointError: the tensors are not those of this model.
        """
        for name, parameter in self._model.named_parameters():
            parameter.copy_(fitting(tensors.get(name), name, parameter))

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
