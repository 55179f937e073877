"""Megatron's DDP and Adam around one model: gradient buffers, updates, and moving them off the device and back.

Never run so far (needs a GPU): everything in `offload` and `onload`; Adam on the host, other than on a CPU that plays
the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from asyncrl.config.sections.training import TrainConfig
from asyncrl.errors import CheckpointError
from asyncrl.training.megatron.host_memory import HostMemory, apart_from, free_cached
from asyncrl.training.megatron.model import PolicyModel

_WEIGHT = "weight"
_MASTER = "master_param"
"""Under this name the hybrid optimizer adds the weight to Adam's state."""


class Optimizer:
    """Gradients, Adam state and weights of one rank.

    With several data-parallel ranks, each holds a part of the Adam state. A single one has nothing to share, and does
    without Megatron's distributed optimizer, which would copy all weights and gradients through collectives of one.

    With `train.optimizer_on_host`, Megatron's hybrid optimizer holds moments and main weights in host memory and
    updates them there; gradient norm and clipping stay on the device. It is a form of the distributed optimizer, on
    any number of ranks.
    """

    def __init__(
        self, model: PolicyModel, config: TransformerConfig, train: TrainConfig, *, data_parallel: int
    ) -> None:
        self._train = train
        self._device = next(model.parameters()).device
        self._host = HostMemory(self._device)
        self._on_host = train.optimizer_on_host and has_memory_of_its_own(self._device)
        self._sharded = data_parallel > 1 or self._on_host
        self._bf16 = config.params_dtype == torch.bfloat16
        wrapped = Float16Module(config, model) if self._bf16 else model
        self.module = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=self._sharded),
            wrapped,
        )
        self._optimizer: MegatronOptimizer = get_megatron_optimizer(
            self._settings(config.params_dtype), [self.module], use_gloo_process_groups=False
        )
        if self._on_host:
            torch.accelerator.empty_host_cache()  # pinned copies of the whole model, of which it has kept its part
        config.finalize_model_grads_func = finalize_model_grads
        self._at_first = self._largest().clamp(min=1.0)
        """Of each parameter, before any step."""

    def zero_grad(self) -> None:
        """Clears the gradients, before each forward-backward."""
        self.module.zero_grad_buffer()
        self._optimizer.zero_grad()

    def grad_norm(self) -> float:
        """Global L2 norm of the reduced gradients. It is the same on every rank, so it is finite on all or none."""
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def step(self, lr: float, grad_norm: float) -> None:
        """Clips to `train.grad_clip` and updates the weights. `grad_norm` must have returned a finite norm before."""
        assert math.isfinite(grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._train.weight_decay * group.get("wd_mult", 1.0)  # 0 for norms and biases
        if self._train.grad_clip > 0:
            clip_grad_by_total_norm_fp32(
                self._optimizer.get_parameters(), self._train.grad_clip, grad_norm, use_decoupled_grad=self._on_host
            )
        self._optimizer.step_with_ready_grads()

    def growth(self) -> float:
        """The largest weight of each parameter relative to that before training, and at least to 1; the maximum.

        Infinite where a weight is not finite. Collective: the same on every rank.
        """
        growth = (self._largest() / self._at_first).nan_to_num(nan=math.inf, posinf=math.inf).max()
        dist.all_reduce(growth, op=dist.ReduceOp.MAX)
        return float(growth)

    def reset(self) -> None:
        """Forgets the moments and the step count of Adam."""
        for optimizer in self._adams():
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group.pop("step", None)  # Transformer Engine's Adam counts per group

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """This rank's part of the weights, in the precision of their updates, and of Adam's state.

        Returns:
            The tensors, copied to host memory, and everything else as JSON.
        """
        tensors = {
            f"{place}.{name}": value.detach().to("cpu", copy=True)
            for place, parameter, state in self._places()
            for name, value in {_WEIGHT: parameter, **state}.items()
            if torch.is_tensor(value) and name != _MASTER
        }
        steps = [[group.get("step") for group in adam.param_groups] for adam in self._adams()]
        return tensors, {"group_steps": steps}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Sets weights and Adam's state to what `state` gave on the same rank of the same layout. Collective.

        Raises CheckpointError: the tensors are not those of this model.
        """
        self.reset()
        by_place: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            place, _, kind = name.rpartition(".")
            by_place.setdefault(place, {})[kind] = tensor
        for place, parameter, state in self._places():
            saved = by_place.pop(place, {})
            parameter.copy_(fitting(saved.pop(_WEIGHT, None), place, parameter))
            # torch's step count, a scalar, stays on the host
            state.update({n: t.to(parameter.device) if t.dim() > 0 else t for n, t in saved.items()})
        for adam, steps in zip(self._adams(), facts["group_steps"], strict=True):
            for group, step in zip(adam.param_groups, steps, strict=True):
                if step is not None:
                    group["step"] = step
        for optimizer in self._parts():
            if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
                for parameter, updated in optimizer.optimizer.param_to_inner_param.items():
                    parameter.copy_(updated)
            elif isinstance(optimizer, MixedPrecisionOptimizer):
                optimizer._copy_main_params_to_model_params()
        if self._sharded:
            self.module.start_param_sync()  # gathers the weights that other ranks hold

    def offload(self, *, keep_weights: bool) -> None:
        """Drops the gradient buffers and moves Adam's state to host memory; the weights go too unless they are kept.

        What went has no memory before `onload`. So without the weights nothing can be exported.
        """
        for buffer in self.module.buffers:
            buffer.offload_to_cpu(move_params=False, move_grads=True)
        weights = list(self.module.parameters())
        self._host.take(apart_from(self._state_tensors(), weights))
        if not keep_weights:
            self._host.take(weights)
        free_cached()

    def onload(self) -> None:
        """Undoes `offload`."""
        self._host.give_back()
        for buffer in self.module.buffers:
            buffer.reload_from_cpu(move_params=False, move_grads=True)
        torch.cuda.synchronize()

    def _settings(self, dtype: torch.dtype) -> OptimizerConfig:
        train = self._train
        settings = OptimizerConfig(
            optimizer="adam",
            lr=train.lr,
            weight_decay=train.weight_decay,
            adam_beta1=train.adam_beta1,
            adam_beta2=train.adam_beta2,
            adam_eps=train.adam_eps,
            clip_grad=train.grad_clip,
            bf16=self._bf16,
            params_dtype=dtype,
            use_distributed_optimizer=self._sharded,
            optimizer_cpu_offload=self._on_host,
            optimizer_offload_fraction=1.0,  # unused without the offload
        )
        if self._on_host:
            # No main weights on the device. The constructor would ask for Transformer Engine's Adam, which is not used.
            settings.use_precision_aware_optimizer = True
            settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        return settings

    @torch.no_grad()
    def _largest(self) -> Tensor:
        """The largest magnitude in each parameter of this rank: float32 on the CPU."""
        extremes = [torch.stack(torch.aminmax(weights)) for weights in self.module.parameters()]
        return torch.stack(extremes).abs().amax(1).float().cpu()

    def _state_tensors(self) -> Iterator[Tensor]:
        """Moments, and main weights in float32; in float32 training these are the weights themselves."""
        for optimizer in self._adams():
            for state in optimizer.state.values():
                yield from (value for value in state.values() if torch.is_tensor(value))
            for group in optimizer.param_groups:
                yield from group["params"]

    def _adams(self) -> Iterator[torch.optim.Optimizer]:
        """The optimizers whose parameters are updated: those of a hybrid one, which hold the weights on the host."""
        for optimizer in self._parts():
            adam = optimizer.optimizer
            yield from adam.sub_optimizers if isinstance(adam, HybridDeviceOptimizer) else [adam]

    def _parts(self) -> list[MegatronOptimizer]:
        parts: list[MegatronOptimizer] = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        return parts

    def _places(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Every parameter of Adam and its state, under a name that is the same in each run of this layout."""
        for i, adam in enumerate(self._adams()):
            for j, group in enumerate(adam.param_groups):
                for k, parameter in enumerate(group["params"]):
                    yield f"{i}.{j}.{k}", parameter, adam.state[parameter]


def has_memory_of_its_own(device: torch.device) -> bool:
    """Whether the device's memory is not the host's, so that something can be moved."""
    return device.type != "cpu"


def fitting(saved: Tensor | None, place: str, parameter: Tensor) -> Tensor:
    """Returns `saved` if it has the shape and dtype of `parameter`. Raises CheckpointError, which names `place`."""
    if saved is None or saved.shape != parameter.shape or saved.dtype != parameter.dtype:
        found = "absent" if saved is None else f"{saved.dtype} {list(saved.shape)}"
        raise CheckpointError(
            f"the checkpoint does not fit: {place} is {found}, not {parameter.dtype} {list(parameter.shape)}"
        )
    return saved
