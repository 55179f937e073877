"""Megatron's process groups and random number generators, of which a process has one set for all its models.

Invariant: they are made once for each rank, by the first model that is built there.
"""

from __future__ import annotations

import math

import torch
from megatron.core import parallel_state, tensor_parallel

from asyncrl.config import Config
from asyncrl.training.megatron import cpu_shim
from asyncrl.training.ranks.layout import RankLayout


def join(config: Config, layout: RankLayout) -> torch.device:
    """Makes what is not there yet, and returns the rank's device.

    Collective; torch.distributed is initialised already, with gloo or NCCL. In the thread that will train.
    """
    cpu_shim.install()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", layout.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor_parallel,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=math.ceil(config.train.collective_timeout_s / 60),
        )
        # The inference tracker is Megatron's own way to do without CUDA's generators; nothing draws random numbers.
        tensor_parallel.model_parallel_cuda_manual_seed(config.train.seed, inference_rng_tracker=not cuda)
    return device
