"""Layouts of ranks, and what a layer keeps for its backward pass, change neither losses nor gradients nor weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

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
