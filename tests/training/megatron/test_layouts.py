"""Layouts of ranks, and what a layer keeps for its backward pass, change neither losses nor gradients nor weights."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.training.learner.learner import Learner
from asyncrl.training.megatron.modules import RMSNorm
from asyncrl.training.ranks.layout import RankLayout
from tests.training.forked_ranks import run_ranks
from tests.training.megatron.learners import optimizer_of, weights_of
from tests.training.megatron.test_training import STEPS, assert_same_weights, batch_of, trainer_of

LAYOUTS = {
    "one rank": (1, 1),
    "TP 2 and DP 2": (4, 2),
    "DP 2": (2, 1),
    "TP 2": (2, 2),
}
"""World size and tensor parallelism. Each gets the export of the one before, and the first that of the last."""


def train_and_pass_on(
    layout: RankLayout, path: Path, former: Path, target: Path
) -> tuple[list[dict[str, float]], dict[str, Tensor], bool]:
    """Trains from `path`, and exports to `target` what it imported from `former`."""
    trainer = trainer_of(layout, path)
    metrics = [trainer.train(batch_of(step)) for step in range(STEPS)]
    guest = trainer_of(layout, former)
    guest.backend.export_hf(target)
    norms = [module for module in optimizer_of(trainer).module.modules() if isinstance(module, RMSNorm)]
    return metrics, weights_of(trainer), all(norm.weight.sequence_parallel for norm in norms)


def test_every_layout_trains_as_one_rank_does_and_passes_weights_on_to_the_next_bit_for_bit(
    model_directory: Any, tmp_path: Path
) -> None:
    path = former = model_directory("qwen3")
    expected: tuple[list[dict[str, float]], dict[str, Tensor]] | None = None
    for number, (world_size, tensor_parallel) in enumerate(LAYOUTS.values()):
        target = tmp_path / str(number)
        results = run_ranks(
            train_and_pass_on, path, former, target, world_size=world_size, tensor_parallel=tensor_parallel
        )
        handed, got_on = (load_file(directory / "model.safetensors") for directory in (former, target))
        assert handed.keys() == got_on.keys()
        assert all(torch.equal(tensor, got_on[name]) for name, tensor in handed.items())
        for metrics, weights, cut_along_tokens in results:
            expected = expected or (metrics, weights)
            assert cut_along_tokens == (tensor_parallel > 1)
            for got, want in zip(metrics, expected[0], strict=True):
                for name in ("train/loss", "train/grad_norm"):
                    assert got[name] == pytest.approx(want[name], rel=1e-4), name
            assert_same_weights(weights, expected[1], 1e-4)
        former = target


class Kept:
    """Counts what forward passes keep for the backward pass beside the weights, until it is used, in bytes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.now = self.most = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)
        self._weights = {weights.untyped_storage().data_ptr() for weights in model.parameters()}

    def _pack(self, tensor: Tensor) -> _Held:
        held = _Held(tensor)
        if tensor.untyped_storage().data_ptr() not in self._weights:
            self._count(tensor.nbytes)
            weakref.finalize(held, self._count, -tensor.nbytes)
        return held

    def _count(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


@dataclass(eq=False)
class _Held:
    tensor: Tensor


def train_recomputing(layout: RankLayout, path: Path) -> list[tuple[dict[str, float], list[Tensor], Tensor, int]]:
    results = []
    for recompute in ("none", "mlp", "full"):
        trainer: Learner = trainer_of(layout, path, recompute=recompute)
        kept = Kept(optimizer_of(trainer).module)
        with kept.hooks:
            metrics = [trainer.train(batch_of(step)) for step in range(2)]
        gradients = [buffer.grad_data.clone() for buffer in optimizer_of(trainer).module.buffers]
        results.append((metrics, gradients, trainer.logprobs(batch_of(2)), kept.most))
    return results


@pytest.mark.parametrize("world", [{"world_size": 2}, {"world_size": 2, "tensor_parallel": 2}], ids=["DP 2", "TP 2"])
def test_recomputation_keeps_less_and_changes_no_bit(model_directory: Any, world: dict[str, int]) -> None:
    for none, mlp, full in run_ranks(train_recomputing, model_directory("qwen3-tied"), **world):
        for metrics, gradients, logprobs, _ in (mlp, full):
            assert metrics == none[0]
            assert all(map(torch.equal, gradients, none[1])) and all(gradient.any() for gradient in gradients)
            assert torch.equal(logprobs, none[2])
        assert none[3] > mlp[3] > full[3]
