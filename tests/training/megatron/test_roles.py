"""A frozen reference beside the actor on real ranks: weights alone, its own log-probs, and a place in checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.algorithms.off_policy import AUTO_MISMATCH
from asyncrl.config import Config
from asyncrl.observability.events import EventLog
from asyncrl.training.backends import make_backend
from asyncrl.training.learner.learner import Learner
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.training.roles import Role, frozen_roles
from asyncrl.training.train_group import TrainGroup
from tests.training.batches import make_batch
from tests.training.forked_ranks import run_ranks
from tests.training.megatron.learners import learner_of
from tests.training.worlds import run_world

LENGTHS = [(5, 9), (3, 30), (17, 2), (1, 12)]
LAYOUTS = pytest.mark.parametrize(
    ("ranks", "tensor_parallel"), [(1, 1), (2, 1), (2, 2)], ids=["one rank", "DP 2", "TP 2"]
)


async def train_two_steps(group: TrainGroup) -> list[str]:
    return [(await group.train(step, make_batch(LENGTHS, rollout_id=step)))["train/loss"].hex() for step in range(2)]


@LAYOUTS
def test_a_reference_keeps_its_log_probs_while_the_actor_trains_and_through_a_resume(
    model_directory: Any, tmp_path: Path, ranks: int, tensor_parallel: int
) -> None:
    batch = make_batch(LENGTHS)

    async def alone(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        return await train_two_steps(group), await group.logprobs(batch)

    async def with_reference(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        before = await group.logprobs(batch, role="reference")
        losses = await train_two_steps(group)
        path = await group.save_checkpoint(1, wait=True)
        return before, losses, await group.logprobs(batch), await group.logprobs(batch, role="reference"), path

    async def resumed(group: TrainGroup, events: EventLog) -> Any:
        return await group.init(), await group.logprobs(batch), await group.logprobs(batch, role="reference")

    def run(scenario: Any, directory: str, **more: Any) -> Any:
        config = {
            "run": {"dir": tmp_path / directory},
            "model": {"path": model_directory("qwen3")},
            "train": {"lr": 1e-3, "tensor_parallel": tensor_parallel},
        }
        return run_world(scenario, world_size=ranks, config=config, make_backend=make_backend, **more).value

    reference = (Role("reference", str(model_directory("qwen2-tied")), trained=False),)
    expected_losses, expected = run(alone, "alone")
    before, losses, actor, after, path = run(with_reference, "both", roles=reference)
    assert losses == expected_losses and torch.equal(actor, expected), "the actor trains as it does alone"
    assert torch.equal(before, after) and not torch.equal(after, actor)
    step, again, reference_again = run(resumed, "both", roles=reference)
    assert step == 2 and torch.equal(again, actor) and torch.equal(reference_again, after)
    shard = load_file(path / f"trainer/reference/rank-00000-of-0000{ranks}.safetensors")
    weights = {name for name in shard if not name.startswith("rng.")}
    assert len(weights) > 15 and not any("exp_avg" in name for name in weights)
    assert sorted(folder.name for folder in path.iterdir() if folder.is_dir()) == ["model", "trainer"]


def logprobs_of_both(layout: RankLayout, path: Path) -> tuple[Tensor, Tensor, int, int]:
    config = Config.model_validate({"model": {"path": path}, "train": {"tensor_parallel": layout.tensor_parallel}})
    backend = make_backend(config, layout, Role("reference", str(path), trained=False))
    backend.init()
    batch = make_batch(LENGTHS)
    frozen = Learner(config, layout, backend).logprobs(batch)
    model: Any = backend
    parameters = list(model._model.module.parameters())
    held = sum(tensor.numel() for name, tensor in backend.snapshot().shard.tensors.items() if "rng" not in name)
    assert not any(parameter.requires_grad for parameter in parameters)
    actor = learner_of(layout, model={"path": path})  # whose process groups are those of the reference
    return frozen, actor.logprobs(batch), held, sum(parameter.numel() for parameter in parameters)


@LAYOUTS
def test_a_frozen_role_holds_weights_alone_and_computes_what_the_actor_computes(
    model_directory: Any, ranks: int, tensor_parallel: int
) -> None:
    world = {"world_size": ranks, "tensor_parallel": tensor_parallel}
    ranks_of_both = run_ranks(logprobs_of_both, model_directory("qwen3"), **world)
    for frozen, actor, _, _ in ranks_of_both:
        assert torch.equal(frozen, actor)
    held, parameters = (sum(rank[i] for rank in ranks_of_both) for i in (2, 3))
    assert held * ranks // tensor_parallel == parameters, "copies of the model save one of them together"


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(1, 1), (2, 1)], ids=["one rank", "DP 2"])
def test_the_reference_is_the_policy_after_its_warm_up_and_is_refreshed_as_often_as_asked(
    model_directory: Any, tmp_path: Path, ranks: int, tensor_parallel: int
) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        for step in range(2):
            await group.train_sft(None, make_batch(LENGTHS, rollout_id=10 + step), 1e-3)
        steps = [await group.train(step, make_batch(LENGTHS, rollout_id=step)) for step in range(4)]
        await group.offload()
        await group.onload()
        return [metrics["train/kl_reference"] for metrics in steps]

    config = {
        "run": {"dir": tmp_path},
        "model": {"path": model_directory("qwen3")},
        "train": {"lr": 1e-3, "tensor_parallel": tensor_parallel},
        "algorithm": {"kl": "loss", "kl_coefficient": 0.1, "reference_interval": 2},
    }
    distances = run_world(scenario, world_size=ranks, config=config, make_backend=make_backend).value
    assert [distance > 1e-9 for distance in distances] == [False, True, False, True]


def test_a_teacher_of_another_architecture_teaches(model_directory: Any, tmp_path: Path) -> None:
    batch = make_batch(LENGTHS)

    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        teacher = await group.logprobs(batch, role="teacher")
        told = []
        for step in range(12):  # what it samples stays the same: the engine's log-probs are those of the policy
            sampled = replace(batch, rollout_id=step, logprobs=await group.logprobs(batch))
            told.append((await group.train(step, sampled))["train/kl_teacher"])
        return told, torch.equal(teacher, await group.logprobs(batch, role="teacher"))

    config = {
        "run": {"dir": tmp_path},
        "model": {"path": model_directory("qwen3")},
        "rollout": {"max_staleness": 20},
        "train": {"lr": 1e-3, "algorithm": "distill"},
        "algorithm": {"teacher": model_directory("qwen2-tied")},
    }
    told, unchanged = run_world(scenario, world_size=1, config=config, make_backend=make_backend).value
    assert unchanged and len({round(value, 4) for value in told}) > 6
    given = Config.model_validate(config)
    assert [role.name for role in frozen_roles(("teacher",), given)] == ["teacher"]


def test_an_automatic_correction_begins_once_the_mismatch_asks_for_it_and_goes_on_after_a_resume(
    model_directory: Any, tmp_path: Path
) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        figures = []
        for step in range(3):
            batch = make_batch(LENGTHS, rollout_id=step)
            apart = 0.0 if step == 0 else 0.5
            engine = await group.logprobs(batch) - apart * batch.sampled
            figures.append(await group.train(step, replace(batch, logprobs=engine)))
        await group.save_checkpoint(2, wait=True)
        return figures

    async def resumed(group: TrainGroup, events: EventLog) -> Any:
        step = await group.init()
        return [await group.train(step, make_batch(LENGTHS, rollout_id=step))]

    config = {
        "run": {"dir": tmp_path},
        "model": {"path": model_directory("qwen3")},
        "rollout": {"max_staleness": 20},
        "train": {"lr": 1e-4},
        "algorithm": {"correction": "auto", "correction_upper": 1.2},
    }
    run = {"world_size": 1, "config": config, "make_backend": make_backend}
    first = run_world(scenario, **run).value
    assert [metrics["train/mismatch_k3"] > AUTO_MISMATCH for metrics in first] == [False, True, True]
    assert ["train/correction_weight" in metrics for metrics in first] == [False, False, True]
    assert first[2]["train/correction_weight"] == pytest.approx(1.2) and first[2]["train/corrected_high"] == 1.0
    [after] = run_world(resumed, **run).value
    assert "train/correction_weight" in after
