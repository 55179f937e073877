"""Adam in one kernel, as on a GPU; gradients that are reduced while others are computed; the precision of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import param_and_grad_buffer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.training.learner.learner import Learner
from asyncrl.training.megatron.optimizer import fuse
from asyncrl.training.ranks.layout import RankLayout
from tests.training.forked_ranks import run_ranks
from tests.training.megatron.learners import learner_of, optimizer_of, weights_of
from tests.training.megatron.test_training import assert_same_weights, batch_of, trainer_of


def adams(trainer: Learner) -> list[torch.optim.Optimizer]:
    return list(optimizer_of(trainer)._adams())


class Operations(TorchDispatchMode):
    """Notes the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def train_fused(layout: RankLayout, path: Any, fused: bool) -> tuple[dict[str, Tensor], set[str], list[Tensor]]:
    trainer = trainer_of(layout, path, lr_warmup_steps=0)
    if fused:
        for adam in adams(trainer):
            fuse(adam)
    for step in range(3):
        trainer.train(batch_of(step))
    with Operations() as operations:
        for adam in adams(trainer):
            adam.step()
    counts = [state["step"] for adam in adams(trainer) for state in adam.state.values()]
    return weights_of(trainer), operations.names, counts


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fused_adam_makes_the_same_updates_in_one_kernel(model_directory: Any, ranks: int) -> None:
    path = model_directory("qwen3")
    plain, several, _ = run_ranks(train_fused, path, False, world_size=ranks)[0]
    fused, one, counts = run_ranks(train_fused, path, True, world_size=ranks)[0]
    assert "_fused_adamw_" in one and "_fused_adamw_" not in several
    assert not one & several & {"lerp_", "addcmul_", "addcdiv_", "sqrt", "div"}, "no temporaries of the size of weights"
    assert all(count == 4 for count in counts)
    assert_same_weights(fused, plain, 1e-4)  # Adam divides by rounding noise where a gradient is nothing else


def reductions(layout: RankLayout, path: Any) -> list[list[str]]:
    """What each step did, in order: micro-batches begun, reductions begun, the end of the backward passes."""
    trainer = trainer_of(layout, path, max_tokens_per_microbatch=32)
    module, done = optimizer_of(trainer).module, list[str]()
    start, finish = param_and_grad_buffer._ParamAndGradBucketGroup.start_grad_sync, module.finish_grad_sync

    def noted_start(group: Any, *arguments: Any, **options: Any) -> None:
        done.append("reduction")
        start(group, *arguments, **options)

    def noted_finish(*arguments: Any, **options: Any) -> None:
        done.append("end")
        finish(*arguments, **options)

    param_and_grad_buffer._ParamAndGradBucketGroup.start_grad_sync = noted_start
    module.finish_grad_sync = noted_finish
    module.register_forward_pre_hook(lambda *_: done.append("micro-batch"))
    steps = []
    for step in range(3):
        done.clear()
        trainer.train(batch_of(step))
        steps.append(list(done))
    return steps


def test_gradients_are_reduced_once_a_step_before_the_last_backward_pass_has_ended(model_directory: Any) -> None:
    for _, *later in run_ranks(reductions, model_directory("qwen3"), world_size=2):
        for step in later:  # in the first one Megatron learns how often each parameter gets a gradient
            assert step.count("micro-batch") > 1 and step.count("reduction") == 1
            assert step[-2:] == ["reduction", "end"]


def logit_dtypes(layout: RankLayout, path: Any, dtype: str) -> set[torch.dtype]:
    trainer = learner_of(layout, model={"path": path, "dtype": dtype}, run={"dir": path.parent})
    seen = set[torch.dtype]()
    optimizer_of(trainer).module.register_forward_hook(lambda module, arguments, logits: seen.add(logits.dtype))
    trainer.train(batch_of(0))
    return seen


def test_logits_have_the_precision_of_the_model(model_directory: Any) -> None:
    for dtype in ("bfloat16", "float32"):
        assert run_ranks(logit_dtypes, model_directory("qwen3"), dtype) == [{getattr(torch, dtype)}]


def norms_of(layout: RankLayout, path: Any, dtype: str) -> list[tuple[float, float]]:
    trainer = learner_of(layout, model={"path": path, "dtype": dtype}, train={"lr": 1e-3})
    norms = []
    for step in range(3):
        trainer.train(batch_of(step))
        norms.append((optimizer_of(trainer).grad_norm(), optimizer_of(trainer)._optimizer.get_grad_norm()))
    return norms


@pytest.mark.parametrize(
    ("world", "dtype"),
    [({}, "float32"), ({"world_size": 2}, "float32"), ({"world_size": 2, "tensor_parallel": 2}, "bfloat16")],
    ids=["one rank", "DP", "TP in bfloat16"],
)
def test_the_norm_of_gradients_is_megatrons_to_the_last_bit(model_directory: Any, world: Any, dtype: str) -> None:
    for norms in run_ranks(norms_of, model_directory("qwen3"), dtype, **world):
        assert all(norm == megatrons > 0 for norm, megatrons in norms), norms
