"""Algorithms of a user's own (tests/algorithms/own.py) trained on real ranks, beside their formulas written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.data.batch import RolloutBatch
from asyncrl.data.sample import VersionSpan
from asyncrl.errors import AlgorithmError
from asyncrl.observability.events import EventLog
from asyncrl.training.backends import make_backend
from asyncrl.training.train_group import TrainGroup
from tests.training.megatron.test_training import LENGTHS, TRAIN, Reference, assert_same_weights, batch_of
from tests.training.worlds import World, run_world

STEPS = 3
RATES = [0.5e-3, 1e-3, 1e-3]
LAYOUTS = pytest.mark.parametrize(
    ("ranks", "tensor_parallel"), [(1, 1), (2, 1), (2, 2)], ids=["one rank", "DP 2", "TP 2"]
)


def trained_batch(step: int) -> RolloutBatch:
    """Its tokens were made by the weights before the step and, in the first sample, by those before."""
    batch = batch_of(step)
    versions = tuple(
        (VersionSpan(f"0.{max(0, step - (i == 0))}", prompt, prompt + response),)
        for i, (prompt, response) in enumerate(LENGTHS)
    )
    return replace(batch, versions=versions)


def run(
    path: Path, run_dir: Path, algorithm: str, scenario: Any, ranks: int, section: Any = None, **train: Any
) -> World:
    config = {
        "run": {"dir": run_dir},
        "model": {"path": path},
        "rollout": {"max_staleness": 4},
        "algorithm": section or {},
        "train": {**TRAIN, "algorithm": algorithm if section else f"tests.algorithms.own:{algorithm}", **train},
    }
    return run_world(scenario, world_size=ranks, config=config, make_backend=make_backend)


class Kept:
    """A sink that keeps the weights."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor.clone()

    def finish(self) -> None: ...


async def train_and_export(group: TrainGroup, events: EventLog) -> Any:
    await group.init()
    metrics = [await group.train(step, trained_batch(step)) for step in range(STEPS)]
    kept = Kept()
    await group.export(kept, 30.0)
    return metrics, kept.tensors


@LAYOUTS
def test_an_entropy_bonus_trains_as_autograd_of_its_formula_does(
    model_directory: Any, tmp_path: Path, ranks: int, tensor_parallel: int
) -> None:
    path = model_directory("qwen3-tied")
    settings = {"tensor_parallel": tensor_parallel, "algorithm_args": {"weight": 0.5}}
    metrics, weights = run(path, tmp_path, "WithEntropy", train_and_export, ranks, **settings).value
    expected, plain = Reference(path), Reference(path)
    for step, (got, lr) in enumerate(zip(metrics, RATES, strict=True)):
        want = expected.step(batch_of(step), lr, temperature=0.8, grpo=True, entropy_weight=0.5)
        without = plain.step(batch_of(step), lr, temperature=0.8, grpo=True)
        for name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert got[name] == pytest.approx(want[name], rel=2e-4, abs=1e-6)
        assert abs(got["train/grad_norm"] - without["train/grad_norm"]) > 1e-2, "the bonus is felt"
    assert_same_weights(weights, expected.weights(), 1e-4)


@LAYOUTS
def test_an_advantage_of_ones_own_trains_as_its_formula_does(
    model_directory: Any, tmp_path: Path, ranks: int, tensor_parallel: int
) -> None:
    path = model_directory("qwen3-tied")
    world = run(path, tmp_path, "LeaveOneOut", train_and_export, ranks, tensor_parallel=tensor_parallel)
    metrics, weights = world.value
    expected = Reference(path)
    for step, (got, lr) in enumerate(zip(metrics, RATES, strict=True)):
        batch = batch_of(step)
        same = batch.group_index[:, None] == batch.group_index[None]
        others = [batch.rewards[same[i] & (torch.arange(len(same)) != i)].mean() for i in range(len(same))]
        advantages = batch.rewards - torch.stack(others)
        want = expected.step(batch, lr, temperature=0.8, grpo=True, advantages=advantages)
        for name in ("train/loss", "train/grad_norm"):
            assert got[name] == pytest.approx(want[name], rel=2e-4, abs=1e-6)
        assert got["train/reward_total"] == pytest.approx(float(batch.rewards.sum()))
        assert "train/groups_without_signal" not in got
    assert_same_weights(weights, expected.weights(), 1e-4)


@LAYOUTS
def test_old_log_probs_are_those_before_the_first_optimizer_step_and_staleness_is_told(
    model_directory: Any, tmp_path: Path, ranks: int, tensor_parallel: int
) -> None:
    path = model_directory("qwen3-tied")

    def figures(**train: Any) -> Any:
        settings = {"tensor_parallel": tensor_parallel, **train}
        metrics, _ = run(path, tmp_path, "Decoupled", train_and_export, ranks, **settings).value
        return metrics

    for step, metrics in enumerate(figures()):
        assert metrics["train/ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["train/staleness_max"] == min(step, 1)
    assert figures(batch_epochs=2)[0]["train/ratio_max"] > 1.01, "the second pass is measured against the same"


@pytest.mark.parametrize("method", ["columns", "loss"])
def test_an_algorithm_that_raises_is_named(model_directory: Any, tmp_path: Path, method: str) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        await group.train(0, trained_batch(0))
        with pytest.raises(AlgorithmError) as caught:
            await group.train(1, trained_batch(1))
        return str(caught.value), group.statistics().failure is None

    world = run(model_directory("qwen3"), tmp_path, "Broken", scenario, 2, algorithm_args={"method": method})
    message, goes_on = world.value
    assert f"train.algorithm: tests.algorithms.own:Broken failed in {method}: ValueError: boom" in message
    assert "own.py" in message, "with the place"
    assert goes_on == (method == "columns"), "columns are made before any rank has begun"


async def train_truncated(group: TrainGroup, events: EventLog) -> Any:
    """Two optimizer steps on each batch; one sample was cut off."""
    await group.init()
    cut = torch.tensor([i == 1 for i in range(len(LENGTHS))])
    return [await group.train(step, replace(trained_batch(step), truncated=cut)) for step in range(STEPS)]


def test_what_belongs_to_whole_sequences_is_the_same_on_any_number_of_ranks(
    model_directory: Any, tmp_path: Path
) -> None:
    path, worlds = model_directory("qwen3-tied"), []
    section = {
        **{"truncated_weight": 0, "entropy_bonus": 0.01, "aggregation": "group", "clip_low": 0.1, "clip_high": 0.1},
        **{"correction": "truncate", "correction_level": "geometric", "correction_upper": 1.5, "correction_lower": 0.1},
    }
    for ranks, tensor_parallel in ((1, 1), (2, 1), (2, 2)):
        settings = {"tensor_parallel": tensor_parallel, "minibatches": 2}
        worlds.append(run(path, tmp_path / f"{len(worlds)}", "gspo", train_truncated, ranks, section, **settings).value)
    alone = worlds[0]
    assert all(metrics["train/truncated_out"] == 1 and metrics["train/mismatch_k3"] > 0 for metrics in alone)
    for others in worlds[1:]:
        for want, got in zip(alone, others, strict=True):
            assert want.keys() == got.keys()
            for name in want:
                assert got[name] == pytest.approx(want[name], rel=2e-5, abs=2e-6), name
