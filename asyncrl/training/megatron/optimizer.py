"""Megatron's DDP and Adam around one model: gradient buffers, updates, and moving them off the device and back.

Never run so far (needs a GPU): everything in `offload` and `onload`; Adam on the host, other than on a CPU that plays
the device.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.utils import get_total_norm

from asyncrl.config.sections.training import TrainConfig
from asyncrl.errors import CheckpointError
from asyncrl.training.checkpoints.slices import Piece
from asyncrl.training.megatron.host_memory import HostMemory, apart_from, free_cached
from asyncrl.training.megatron.model import PolicyModel
from asyncrl.training.megatron.modules import BFloat16Module
from asyncrl.training.megatron.shards import WEIGHT, Held, Read

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEPS = "adam_steps"


class Optimizer:
    """Gradients, Adam state and weights of one rank.

    With several data-parallel ranks, each holds a part of the Adam state. A single one has nothing to share, and does
    without Megatron's distributed optimizer, which would copy all weights and gradients through collectives of one.

    With `train.optimizer_on_host`, Megatron's hybrid optimizer holds moments and main weights in host memory and
    updates them there; gradient norm and clipping stay on the device. It is a form of the distributed optimizer, on
    any number of ranks.

    Gradients are reduced, a bucket at a time, while the last micro-batch still computes others. Weights are gathered at
    once after each step and not in the next forward pass: they are read before it (`growth`, exports).
    """

    def __init__(
        self, model: PolicyModel, config: TransformerConfig, train: TrainConfig, *, data_parallel: int
    ) -> None:
        self._model = model
        self._train = train
        self._device = next(model.parameters()).device
        self._host = HostMemory(self._device)
        self._on_host = train.optimizer_on_host and has_memory_of_its_own(self._device)
        self._sharded = data_parallel > 1 or self._on_host
        self._bf16 = config.params_dtype == torch.bfloat16
        wrapped = BFloat16Module(config, model) if self._bf16 else model
        self.module = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=self._sharded,
                overlap_grad_reduce=data_parallel > 1,
            ),
            wrapped,
        )
        config.no_sync_func = self.module.no_sync  # the schedule opens it around all micro-batches but the last
        self._optimizer: MegatronOptimizer = get_megatron_optimizer(
            self._settings(config.params_dtype), [self.module], use_gloo_process_groups=False
        )
        if self._on_host:
            # It was built twice, first over the whole model, as a cycle of references that holds float32 weights.
            gc.collect()
            torch.accelerator.empty_host_cache()
        elif has_memory_of_its_own(self._device):
            for adam in self._adams():
                fuse(adam)
        config.finalize_model_grads_func = finalize_model_grads
        self._at_first = self._largest().clamp(min=1.0)
        """Of each parameter, before any step."""

    def zero_grad(self) -> None:
        """Clears the gradients, before each forward-backward."""
        self.module.zero_grad_buffer()
        self._optimizer.zero_grad()

    def grad_norm(self) -> float:
        """Global L2 norm of the reduced gradients. It is the same on every rank, so it is finite on all or none.

        It is Megatron's, whose own way without Apex and Transformer Engine waits for the device for each parameter.
        """
        self._optimizer.prepare_grads()
        gradients = [gradient for part in self._parts() for gradient in part.get_main_grads_for_grad_norm()]
        square = get_total_norm(gradients).to(self._device) ** 2  # a rank may have none, and torch's 0 is on the CPU
        dist.all_reduce(square, group=self._optimizer.get_grad_stats_parallel_group())
        norm: float = float(square) ** 0.5
        return norm

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

    def state(self) -> tuple[list[Held], dict[str, Any]]:
        """What this rank updates: weights in the precision of their updates, and Adam's moments, all of them live.

        The facts are the number of Adam's steps, which all parameters share.
        """
        origins, held, steps = self._origins(), [], 0
        for adam, group, parameter in self._updated():
            state = adam.state.get(parameter, {})
            moments = {kind: state[kind] for kind in _MOMENTS if kind in state}
            held.append(Held(*origins[parameter], {WEIGHT: parameter, **moments}))
            steps = steps or int(state.get("step") or group.get("step") or 0)  # see `set_steps`
        return held, {_STEPS: steps}

    @torch.no_grad()
    def restore(self, facts: dict[str, Any], read: Read) -> None:
        """Sets weights and Adam's state to what the `state` of all ranks gave, in whatever layout. Collective.

        Raises CheckpointError: they are not those of this model and of Adam, or cannot be read.
        """
        if _STEPS not in facts:
            raise CheckpointError(
                "the checkpoint has no state of Adam: it was written by a job in which this role was frozen, or that "
                "had another optimizer"
            )
        self.reset()
        origins, steps = self._origins(), int(facts[_STEPS])
        for adam, group, parameter in self._updated():
            name, piece = origins[parameter]
            parameter.copy_(read(name, WEIGHT, piece, parameter.dtype).view(parameter.shape))
            if steps == 0:
                continue
            for kind in _MOMENTS:
                moment = torch.empty_like(parameter, requires_grad=False)
                adam.state[parameter][kind] = moment.copy_(read(name, kind, piece, moment.dtype).view(parameter.shape))
            set_steps(adam, group, parameter, steps)
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

    def _updated(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], Tensor]]:
        """Every tensor that this rank's Adam updates, with its group."""
        for adam in self._adams():
            for group in adam.param_groups:
                for parameter in group["params"]:
                    yield adam, group, parameter

    def _origins(self) -> dict[Tensor, tuple[str, Piece]]:
        """By each tensor that Adam updates: the name of its parameter, and which piece of this rank's part it is."""
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        if not self._sharded:
            return {
                getattr(parameter, "main_param", parameter): (name, Piece(0, parameter.numel(), parameter.numel()))
                for parameter, name in names.items()
            }
        origins = {}
        for optimizer in self._parts():
            assert isinstance(optimizer, DistributedOptimizer)
            parameters = (*optimizer.model_float16_groups, *optimizer.model_fp32_groups)
            halves = optimizer.shard_float16_groups if self._on_host else optimizer.shard_fp32_from_float16_groups
            updated = (*halves, *optimizer.shard_fp32_groups)
            for parameter, tensor in zip(chain(*parameters), chain(*updated), strict=True):
                held = optimizer._get_model_param_range_map(parameter)["param"]
                if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
                    tensor = optimizer.optimizer.param_to_inner_param[tensor]
                origins[tensor] = names[parameter], Piece(held.start, held.end, parameter.numel())
        return origins


def has_memory_of_its_own(device: torch.device) -> bool:
    """Whether the device's memory is not the host's, so that something can be moved."""
    return device.type != "cpu"


def set_steps(adam: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, steps: int) -> None:
    """Sets Adam's step count: torch's counts for each parameter, and Transformer Engine's for each group."""
    if isinstance(adam, torch.optim.Adam):
        on_device = group.get("fused") or group.get("capturable")
        device = parameter.device if on_device else torch.device("cpu")
        adam.state[parameter]["step"] = torch.tensor(float(steps), dtype=torch.float32, device=device)
    else:
        group["step"] = steps


def fuse(adam: torch.optim.Optimizer) -> None:
    """Makes torch's Adam update each parameter in one kernel, without temporaries of the size of the weights.

    Megatron builds it without the option, which torch reads from its groups at each step. The step count lies on the
    device of the parameter then. Adam of another library is fused already.
    """
    if isinstance(adam, torch.optim.AdamW):
        for group in adam.param_groups:
            group["fused"], group["foreach"] = True, False
