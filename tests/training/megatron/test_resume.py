"""A real trainer that is killed and goes on from its checkpoint ends where one ends that was never killed, bit for bit:
losses, gradient norms, weights, optimizer state and random number generators."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.observability.events import EventLog
from asyncrl.training.learner.packing import MicroBatch
from asyncrl.training.learner.step_loss import StepLoss
from asyncrl.training.learner.tally import Tally
from asyncrl.training.megatron.backend import MegatronBackend
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.training.roles import Role
from asyncrl.training.train_group import TrainGroup
from tests.training.batches import make_batch
from tests.training.worlds import Scenario, run_world

LENGTHS = [(5, 9), (3, 30), (17, 2), (1, 12), (8, 9), (2, 2), (20, 14), (6, 6)]
KEYS = ("train/loss", "train/grad_norm", "train/lr", "train/logprob_diff_mean", "train/drawn")


class DrawingBackend(MegatronBackend):
    """Each optimizer step draws from every generator, as a model with dropout would."""

    def forward_backward(self, batch: RolloutBatch, micro_batches: Sequence[MicroBatch], loss: StepLoss) -> Tally:
        tally = super().forward_backward(batch, micro_batches, loss)
        tally.sums["drawn"] = random.random() + np.random.rand() + torch.rand(1).item()
        return tally


def make_backend(config: Config, layout: RankLayout, role: Role) -> DrawingBackend:
    random.seed(layout.rank)
    np.random.seed(layout.rank)
    torch.manual_seed(layout.rank)
    return DrawingBackend(config, layout, role)


def batch_of(rollout_id: int) -> RolloutBatch:
    return make_batch(LENGTHS, groups=[0, 1, 0, 1, 0, 2, 2, 1], rollout_id=rollout_id)


def steps(end: int, *, save_at: tuple[int, ...], killed: bool = False) -> Scenario:
    """Trains up to step `end` from wherever it begins; returns where that was, and the figures of each step."""

    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        start = await group.init()
        extra = None if group.resumed is None else dict(group.resumed.extra)
        figures = []
        for rollout_id in range(start, end):
            metrics = await group.train(rollout_id, batch_of(rollout_id))
            figures.append([metrics[key].hex() for key in KEYS])
            if rollout_id + 1 in save_at:
                assert await group.save_checkpoint(rollout_id, {"ledger.json": b"%d" % rollout_id}, wait=True)
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return start, extra, figures

    return scenario


def contents(checkpoint: Path) -> dict[str, dict[str, Tensor] | Any]:
    files = {str(path.relative_to(checkpoint)): path for path in checkpoint.rglob("*") if path.is_file()}
    return {
        name: load_file(path) if path.suffix == ".safetensors" else json.loads(path.read_text())
        for name, path in files.items()
        if name not in ("manifest.json", "config.toml")  # of two run directories
    }


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "dtype"),
    [(1, 1, "float32"), (2, 1, "float32"), (2, 2, "float32"), (1, 1, "bfloat16"), (2, 1, "bfloat16")],
    ids=["one rank", "DP 2", "TP 2", "one rank in bfloat16", "DP 2 in bfloat16"],
)
def test_three_steps_kill_and_three_steps_equal_six_steps(
    model_directory: Any, tmp_path: Path, ranks: int, tensor_parallel: int, dtype: str
) -> None:
    def run(directory: str, scenario: Scenario) -> Any:
        config = {
            "run": {"dir": tmp_path / directory},
            "model": {"path": model_directory("qwen3"), "dtype": dtype},
            "train": {
                "lr": 1e-3, "weight_decay": 0.1, "grad_clip": 0.5, "lr_warmup_steps": 4, "minibatches": 2,
                "max_tokens_per_microbatch": 64, "tensor_parallel": tensor_parallel,
            },
        }  # fmt: skip
        return run_world(scenario, world_size=ranks, config=config, make_backend=make_backend, timeout_s=60).value

    start, _, expected = run("whole", steps(6, save_at=(6,)))
    assert start == 0
    assert run("killed", steps(4, save_at=(3,), killed=True)) is None
    start, extra, figures = run("killed", steps(6, save_at=(6,)))

    assert (start, extra) == (3, {"ledger.json": b"2"})
    assert figures == expected[3:]
    whole = contents(tmp_path / "whole/checkpoints/step-000006")
    resumed = contents(tmp_path / "killed/checkpoints/step-000006")
    assert whole.keys() == resumed.keys()
    assert sum(name.endswith(".safetensors") for name in whole) == ranks + 1
    for name, content in whole.items():
        if name.endswith(".safetensors"):
            other = resumed[name]
            assert content.keys() == other.keys() and len(content) > 20
            assert all(torch.equal(tensor, other[key]) for key, tensor in content.items()), name
        else:
            assert content == resumed[name], name
