"""A step on a GPU, played on the meta device: the host waits for the device three times a step, whatever the depth
of the model and the number of micro-batches.

Tensors of the "GPU" have shapes and no numbers, so nothing that needs a number of them can go unseen: it is counted
where a step may do it, and raises everywhere else.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from asyncrl.algorithms.algorithm import OLD_LOGPROBS, role_logprobs
from asyncrl.algorithms.chosen import make_algorithm
from asyncrl.config import Config
from asyncrl.config.architecture import Architecture
from asyncrl.config.checks.named_code import BUILTIN_ALGORITHMS
from asyncrl.data.batch import RolloutBatch
from asyncrl.training.learner.collate import send
from asyncrl.training.learner.packing import MicroBatch
from asyncrl.training.learner.step_loss import StepLoss, made_by_current_weights
from asyncrl.training.learner.tally import tally
from asyncrl.training.megatron import kernels, step
from asyncrl.training.megatron.kernels import Attention
from asyncrl.training.megatron.model import PolicyModel, transformer_config
from asyncrl.training.megatron.optimizer import Optimizer
from asyncrl.training.ranks.layout import RankLayout
from tests.training.batches import make_batch
from tests.training.forked_ranks import run_ranks

GPU = torch.device("cuda", 0)
META = torch.device("meta")
LENGTHS = [(3, 9), (4, 11), (5, 30), (2, 60), (7, 8), (3, 3)]
MICRO_BATCHES = (MicroBatch((3,)), MicroBatch((2, 1)), MicroBatch((0, 4, 5)))
READS = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.__bool__, torch.Tensor.__float__}


class PlayedGpu(TorchFunctionMode):
    """What is put on the GPU lies on the meta device. Notes who reads it, and what would wait on its way there."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.waiting_copies: list[str] = []
        self._pinned: set[int] = set()
        self._kept: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.pin_memory:
            self._pinned.add(id(args[0]))
            self._kept.append(args[0])
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and args[1] == GPU:
            if args[0].device == META or not kwargs.get("non_blocking") or id(args[0]) not in self._pinned:
                self.waiting_copies.append(caller())
            return args[0].to(META)
        if func is torch.Tensor.to and META in args[1:] and args[0].device != META and caller() != send.__name__:
            self.waiting_copies.append(caller())
        if "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = META
        if func in READS and args[0].device == META:
            self.reads.append(caller())
            answer = torch.ones(args[0].shape, dtype=args[0].dtype)
            return answer if func is torch.Tensor.cpu else func(answer)
        result = func(*args, **kwargs)
        return result.replace("torch.meta.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else result


class Reduction:
    def wait(self) -> None:
        """It is done."""


def reduced(group: Any, force_all_reduce: bool = False) -> None:
    """A reduction that begins and is waited for."""
    assert group.grad_reduce_handle is None or group.is_first_batch
    group.grad_reduce_handle = Reduction()


def caller() -> str:
    """The function outside of torch and this file that made the call."""
    codes = (frame.f_code for frame, _ in traceback.walk_stack(None))
    return next(code.co_name for code in codes if "/torch/" not in code.co_filename and code.co_filename != __file__)


def architecture(layers: int) -> Architecture:
    return Architecture(
        model_type="qwen3",
        num_layers=layers,
        hidden_size=64,
        ffn_hidden_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=101,
        max_positions=512,
        norm_eps=1e-5,
        rope_theta=10000.0,
        rope_llama3_factor=None,
        tied_embeddings=False,
        qkv_bias=False,
        qk_norm=True,
    )


def play(
    layout: RankLayout, dtype: torch.dtype, attention: Attention, algorithms: tuple[str, ...]
) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """The gradient of one optimizer step of each algorithm and a pass of log-probs.

    Returns the reads of each step, those of the pass, and copies that wait.
    """
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world_size * 4)
    torch.cuda.current_device = lambda: META  # type: ignore[assignment,return-value]
    kernels.attention_of = step.attention_of = lambda *_: attention  # type: ignore[assignment]
    Optimizer._largest = lambda self: torch.ones(1)  # type: ignore[method-assign]
    _ParamAndGradBucketGroup.start_grad_sync = reduced  # torch has no meta form of the collective
    with PlayedGpu() as gpu:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
        described = architecture(layers=3)
        config = transformer_config(described, dtype=dtype, tensor_parallel=2)
        with META:
            model = PolicyModel(described, config).to(dtype=dtype)
        optimizer = Optimizer(model, config, Config().train, data_parallel=2)
        assert all(group["fused"] for adam in optimizer._adams() for group in adam.param_groups)
        batch = make_batch(LENGTHS)
        reads = {}
        for name in algorithms:
            optimizer.zero_grad()
            gpu.reads.clear()
            loss = step_loss(batch, name)
            step.forward_backward(optimizer.module, loss.batch, MICRO_BATCHES, loss, vocab_size=101, device=GPU)
            optimizer.grad_norm()
            reads[name] = list(gpu.reads)
        gpu.reads.clear()
        step.forward_logprobs(optimizer.module, batch, MICRO_BATCHES, vocab_size=101, device=GPU)
        return reads, list(gpu.reads), gpu.waiting_copies


def step_loss(batch: RolloutBatch, name: str) -> StepLoss:
    given = {"train": {"algorithm": name}, "algorithm": {"teacher": "models/teacher"} if name == "distill" else {}}
    algorithm = make_algorithm(Config.model_validate(given))
    made = (OLD_LOGPROBS, *map(role_logprobs, algorithm.needs.roles))
    batch = replace(batch, columns=dict.fromkeys(made, batch.logprobs))
    batch = replace(batch, columns={**batch.columns, **algorithm.columns(batch).tokens})
    current = made_by_current_weights(batch, keeps_kv=False)
    return StepLoss(batch, algorithm, current, weights=torch.ones(len(batch.tokens)))


@pytest.mark.parametrize(
    ("dtype", "attention", "algorithms"),
    [
        (torch.bfloat16, Attention.VARIABLE_LENGTH, ("grpo",)),
        (torch.bfloat16, Attention.PADDED, tuple(BUILTIN_ALGORITHMS)),
        (torch.float32, Attention.PADDED, ("grpo",)),
    ],
)
def test_the_host_waits_for_the_gpu_three_times_a_step_whatever_the_layers_and_micro_batches(
    dtype: torch.dtype, attention: Attention, algorithms: tuple[str, ...]
) -> None:
    [(reads, of_logprobs, waiting)] = run_ranks(play, dtype, attention, algorithms)
    assert reads == {
        name: [finalize_model_grads.__name__, tally.__name__, Optimizer.grad_norm.__name__] for name in algorithms
    }
    assert of_logprobs == [step.forward_logprobs.__name__]
    assert waiting == [], "each copy to the GPU is from page-locked memory and queues"
