"""The same steps as transformers with torch's AdamW, on one rank or two; and what happens to a step that is not
finite."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.algorithms import off_policy, policy_gradient
from asyncrl.algorithms.advantages import group_advantages
from asyncrl.algorithms.chosen import token_staleness
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.sample import VersionSpan
from asyncrl.errors import DataError, NonFiniteError
from asyncrl.training.learner import learner
from asyncrl.training.learner.learner import Learner
from asyncrl.training.learner.step_loss import made_by_current_weights
from asyncrl.training.megatron.host_memory import apart_from
from asyncrl.training.ranks.layout import RankLayout
from tests.training.batches import make_batch, split_samples
from tests.training.forked_ranks import run_ranks
from tests.training.megatron.conftest import reference
from tests.training.megatron.learners import learner_of, optimizer_of, weights_of

STEPS = 4
LENGTHS = [(5, 9), (3, 30), (17, 2), (1, 12), (8, 9), (2, 2), (20, 14), (6, 6)]
GROUPS = [0, 1, 0, 1, 0, 2, 2, 1]  # uneven, not adjacent
TRAIN = {"lr": 1e-3, "weight_decay": 0.1, "grad_clip": 0.5, "max_tokens_per_microbatch": 64, "lr_warmup_steps": 2}


def batch_of(step: int, temperature: float = 0.8) -> RolloutBatch:
    responses = sum(r for _, r in LENGTHS)
    mask = torch.rand(responses, generator=torch.Generator().manual_seed(100 + step)) > 0.2
    return make_batch(LENGTHS, groups=GROUPS, temperature=temperature, rollout_id=step, loss_mask=mask)


def trainer_of(layout: RankLayout, path: Path, run_dir: Path | None = None, **train: Any) -> Learner:
    return learner_of(layout, model={"path": path}, run={"dir": run_dir or path.parent}, train={**TRAIN, **train})


def train_grpo(
    layout: RankLayout, path: Path, train: dict[str, Any]
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    trainer = trainer_of(layout, path, **train)
    return [trainer.train(batch_of(step)) for step in range(STEPS)], weights_of(trainer)


def train_sft(layout: RankLayout, path: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    trainer = trainer_of(layout, path)
    return [trainer.train_sft(batch_of(step), lr=2e-3) for step in range(STEPS)], weights_of(trainer)


class Reference:
    """transformers, torch.optim.AdamW and the formulas written out, one sample at a time."""

    def __init__(self, path: Path) -> None:
        self.model = reference(path)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=0.0,
            betas=(0.9, 0.95),
        )

    def step(
        self,
        batch: RolloutBatch,
        lr: float,
        temperature: float,
        grpo: bool,
        advantages: Tensor | None = None,
        entropy_weight: float = 0.0,
    ) -> dict[str, float]:
        """`advantages` of each sample are GRPO's by default."""
        sizes = batch.sampled_lengths.tolist()
        masks, rollout = (values[batch.sampled].split(sizes) for values in (batch.loss_mask, batch.logprobs))
        if advantages is None:
            advantages = group_advantages(batch.rewards, batch.group_index, normalize=True)
        self.optimizer.zero_grad()
        tokens, entropy, difference, loss = int(batch.loss_mask.sum()), 0.0, 0.0, torch.zeros(())
        for i, (ids, prompt) in enumerate(split_samples(batch)):
            scores = (self.model(ids[None]).logits[0, prompt - 1 : -1] / temperature).log_softmax(-1)
            logprobs = scores.gather(-1, ids[prompt:, None]).squeeze(-1)
            if grpo:
                ratio = (logprobs - rollout[i]).exp()
                terms = -torch.minimum(ratio * advantages[i], ratio.clamp(0.8, 1.28) * advantages[i])
            else:
                terms = -logprobs
            entropies = -(scores.exp() * scores).sum(-1)
            loss = loss + (terms - entropy_weight * entropies)[masks[i]].sum() / tokens
            entropy += entropies[masks[i]].sum().item() / tokens
            difference += (logprobs - rollout[i]).abs()[masks[i]].sum().item() / tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return {"train/loss": loss.item(), "train/grad_norm": norm.item(), "train/entropy": entropy, "diff": difference}

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())


def assert_same_weights(weights: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, tensor in weights.items():
        assert (tensor - expected[name]).abs().max() < tolerance, name


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen2-tied", "llama"])
def test_grpo_steps_equal_transformers_with_adamw(model_directory: Any, kind: str) -> None:
    path = model_directory(kind)
    [(metrics, weights)] = run_ranks(train_grpo, path, {})
    expected = Reference(path)
    for step, (got, lr) in enumerate(zip(metrics, [0.5e-3, 1e-3, 1e-3, 1e-3], strict=True)):
        want = expected.step(batch_of(step), lr, temperature=0.8, grpo=True)
        difference = want.pop("diff")
        assert got["train/lr"] == lr
        assert {key: got[key] for key in want} == pytest.approx(want, rel=2e-4, abs=1e-6)
        assert got["train/logprob_diff_mean"] == pytest.approx(difference, rel=1e-4)
        assert got["train/trained_tokens"] == int(batch_of(step).loss_mask.sum())
    # Adam divides by the gradient's own size: where that is rounding noise, so is the update, of up to lr a step
    assert_same_weights(weights, expected.weights(), 1e-4)


def test_sft_steps_equal_transformers_with_adamw_at_temperature_one(model_directory: Any) -> None:
    path = model_directory("qwen3")
    [(metrics, weights)] = run_ranks(train_sft, path)
    expected = Reference(path)
    for step, got in enumerate(metrics):
        want = expected.step(batch_of(step), 2e-3, temperature=1.0, grpo=False)
        del want["diff"]
        assert {key: got[key] for key in want} == pytest.approx(want, rel=2e-4, abs=1e-6)
        assert "train/logprob_diff_mean" not in got
    assert_same_weights(weights, expected.weights(), 2e-4)


def only(batch: RolloutBatch, groups: Sequence[int]) -> RolloutBatch:
    """The batch with nothing but these prompt groups to train."""
    kept = torch.isin(batch.group_index, torch.tensor(groups))[batch.token_samples]
    return replace(batch, loss_mask=batch.loss_mask & kept)


def train_in_passes(
    layout: RankLayout, path: Path, loss: str
) -> tuple[list[dict[str, float]], dict[str, Tensor], dict[str, float]]:
    trainer = trainer_of(layout, path, algorithm=loss, minibatches=2, batch_epochs=3)
    metrics = [trainer.train(batch_of(step)) for step in range(2)]
    return metrics, weights_of(trainer), trainer.train_sft(batch_of(2), lr=1e-3)


@pytest.mark.parametrize("loss", ["grpo", "sft"])
def test_passes_over_a_batch_equal_as_many_steps_of_transformers_on_its_minibatches(
    model_directory: Any, loss: str
) -> None:
    path = model_directory("qwen3-tied")
    [(metrics, weights, warmup)] = run_ranks(train_in_passes, path, loss)
    expected = Reference(path)
    for step, (got, lr) in enumerate(zip(metrics, [0.5e-3, 1e-3], strict=True)):
        minibatches = [only(batch_of(step), groups) for groups in ([0, 1], [2])] * 3
        temperature = 0.8 if loss == "grpo" else 1.0
        wanted = [expected.step(part, lr, temperature, grpo=loss == "grpo") for part in minibatches]
        tokens = [int(part.loss_mask.sum()) for part in minibatches]
        assert (got["train/updates"], got["train/lr"], got["train/trained_tokens"]) == (6, lr, sum(tokens))
        assert got["train/grad_norm"] == pytest.approx(sum(want["train/grad_norm"] for want in wanted) / 6, rel=2e-4)
        for key in ("train/loss", "train/entropy"):  # means over the tokens of all steps
            mean = sum(want[key] * n for want, n in zip(wanted, tokens, strict=True)) / sum(tokens)
            assert got[key] == pytest.approx(mean, rel=2e-4, abs=1e-6)
        if loss == "grpo":
            assert got["train/logprob_diff_mean"] == pytest.approx(wanted[0]["diff"], rel=1e-4)
    assert_same_weights(weights, expected.weights(), 1e-4)
    assert warmup["train/updates"] == 1, "a batch of the warm-up is one step, whatever becomes of rollout batches"


def test_two_ranks_and_other_cuts_give_the_curve_of_one_in_two_passes_of_two_updates(model_directory: Any) -> None:
    path, train = model_directory("qwen3-tied"), {"minibatches": 2, "batch_epochs": 2}
    [(alone, weights)] = run_ranks(train_grpo, path, train)
    assert alone[0]["train/updates"] == 4
    for world in (
        {"train": {**train, "max_tokens_per_microbatch": 1}},
        {"train": train, "world_size": 2},
        {"train": train, "world_size": 2, "tensor_parallel": 2},
    ):
        settings = world.pop("train")
        for metrics, other in run_ranks(train_grpo, path, settings, **world):
            for one, two in zip(alone, metrics, strict=True):
                assert two == pytest.approx(one, rel=1e-4, abs=1e-5)
            assert_same_weights(other, weights, 1e-4)


def train_with_fewer_samples_than_ranks(layout: RankLayout, path: Path) -> tuple[dict[str, float], Tensor]:
    trainer = trainer_of(layout, path)
    batch = make_batch([(3, 5)], groups=[0])
    return trainer.train_sft(batch, lr=1e-3), trainer.logprobs(batch)


def test_a_rank_without_samples_takes_part_and_adds_nothing(model_directory: Any) -> None:
    path = model_directory("qwen3-tied")
    [(alone, logprobs)] = run_ranks(train_with_fewer_samples_than_ranks, path)
    for metrics, others in run_ranks(train_with_fewer_samples_than_ranks, path, world_size=2):
        assert metrics == pytest.approx(alone, rel=1e-5)
        assert torch.allclose(others, logprobs, atol=1e-5)


def train_on_what_the_trainer_sampled(layout: RankLayout, path: Path, train: dict[str, Any]) -> list[dict[str, float]]:
    trainer = trainer_of(layout, path, lr=1e-2, **train)
    results = []
    for step in range(2):
        batch = batch_of(step)
        results.append(trainer.train(replace(batch, logprobs=trainer.logprobs(batch))))
    return results


@pytest.mark.parametrize("train", [{"minibatches": 3}, {"batch_epochs": 3}], ids=["mini-batches", "passes"])
def test_agreement_is_measured_before_the_first_update(model_directory: Any, train: dict[str, Any]) -> None:
    [results] = run_ranks(train_on_what_the_trainer_sampled, model_directory("qwen3-tied"), train)
    for metrics in results:
        assert metrics["train/updates"] == 3
        assert metrics["train/logprob_diff_max"] < 1e-5
        assert (
            metrics["train/ratio_max"] > 1.01
        )  # while later updates do move the policy away from the one that sampled


def train_on_tokens_of_two_versions(layout: RankLayout, path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Every sample was begun by older weights, whose log-probs are off by 1, and ended by the trainer's."""
    trainer = trainer_of(layout, path)
    batch = make_batch([(3, 6), (2, 4)], rollout_id=5, temperature=0.8)
    versions = tuple(
        (VersionSpan("0.4", p, p + r // 2), VersionSpan("0.5", p + r // 2, p + r)) for p, r in ((3, 6), (2, 4))
    )
    older = token_staleness(replace(batch, versions=versions)) == 1
    logprobs = trainer.logprobs(batch) + torch.where(older, 1.0, 0.0)
    mixed = trainer.train(replace(batch, versions=versions, logprobs=logprobs))
    moved = replace(batch, rollout_id=6, versions=tuple((VersionSpan("0.4", p, p + r),) for p, r in ((3, 6), (2, 4))))
    return mixed, trainer.train(replace(moved, logprobs=trainer.logprobs(moved)))


def test_trainer_and_engine_are_compared_over_tokens_that_the_trainers_own_weights_made(model_directory: Any) -> None:
    [(mixed, moved)] = run_ranks(train_on_tokens_of_two_versions, model_directory("qwen3-tied"))
    assert mixed["train/logprob_diff_max"] < 1e-5
    assert mixed["train/policy_moved_mean"] == pytest.approx(1.0, abs=1e-4) == mixed["train/policy_moved_max"]
    assert "train/logprob_diff_mean" not in moved and "train/policy_moved_mean" in moved
    assert moved.keys() | mixed.keys() <= (
        learner.METRICS.keys() | policy_gradient.METRICS.keys() | off_policy.METRICS.keys()
    )


def test_tokens_that_follow_kept_kv_of_older_weights_are_not_compared() -> None:
    batch = make_batch([(3, 6), (2, 4)], rollout_id=5)
    mixed = replace(batch, versions=((VersionSpan("0.4", 3, 5), VersionSpan("0.5", 5, 9)), batch.versions[1]))
    clean = torch.cat([torch.zeros(9), torch.tensor([0, 0, 1, 1, 1, 1])]).bool()
    assert torch.equal(made_by_current_weights(mixed, keeps_kv=True), clean)
    assert int(made_by_current_weights(mixed, keeps_kv=False).sum()) == 8


def poisoned(index: int) -> RolloutBatch:
    """NaN in the rollout log-probs of one sample."""
    batch = batch_of(7)
    poison = batch.sampled & (batch.token_samples == index)
    return replace(batch, logprobs=batch.logprobs.masked_fill(poison, torch.nan))


def train_on_poison(layout: RankLayout, path: Path, run_dir: Path, policy: str, index: int) -> tuple[Any, bool, float]:
    trainer = trainer_of(layout, path, run_dir, on_nonfinite=policy)
    trainer.train(batch_of(0))
    before = weights_of(trainer)
    try:
        outcome: Any = trainer.train(poisoned(index))
    except NonFiniteError as error:
        outcome = str(error)
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in trainer.backend.export_tensors())
    return outcome, unchanged, trainer.train(batch_of(1))["train/loss"]


@pytest.mark.parametrize("layout", [{"world_size": 2}, {"world_size": 2, "tensor_parallel": 2}], ids=["DP", "TP"])
def test_a_nan_on_one_rank_stops_every_rank_before_the_weights_change(
    model_directory: Any, tmp_path: Path, layout: dict[str, int]
) -> None:
    for outcome, unchanged, later_loss in run_ranks(
        train_on_poison, model_directory("qwen3"), tmp_path, "stop", 5, **layout
    ):
        assert "the loss is nan in optimizer step 0 of rollout 7" in outcome
        assert str(tmp_path / "failures" / "rollout-000007.safetensors") in outcome
        assert "extreme in it: log-prob of the engine nan in sample sample-5" in outcome, "what to look at"
        assert "train.lr" not in outcome
        assert unchanged
        assert math.isfinite(later_loss)
    saved = load_file(tmp_path / "failures" / "rollout-000007.safetensors")
    assert torch.equal(saved["tokens"], poisoned(5).tokens)
    facts = json.loads((tmp_path / "failures" / "rollout-000007.json").read_text())
    assert (facts["optimizer_step"], facts["what"]) == (0, "the loss is nan")
    assert "log-prob of the engine nan in sample sample-5" in facts["extremes"]
    assert facts["batch"]["sample_ids"] == list(poisoned(5).sample_ids)


def test_a_nan_step_can_be_skipped_and_counted(model_directory: Any, tmp_path: Path) -> None:
    [(metrics, unchanged, later_loss)] = run_ranks(train_on_poison, model_directory("qwen3"), tmp_path, "skip", 5)
    assert unchanged
    assert (metrics["train/skipped_updates"], metrics["train/updates"]) == (1, 0)
    assert "train/loss" not in metrics
    assert math.isfinite(later_loss)
    assert list(tmp_path.iterdir()) == []


def test_a_batch_that_cannot_be_saved_does_not_hide_why_the_run_stops(model_directory: Any, tmp_path: Path) -> None:
    in_the_way = tmp_path / "failures"
    in_the_way.write_text("a file, not a directory")
    [(outcome, *_)] = run_ranks(train_on_poison, model_directory("qwen3"), tmp_path, "stop", 5)
    assert "the loss is nan" in outcome
    assert "could not be saved" in outcome


def train_with_infinite_gradient(layout: RankLayout, path: Path, run_dir: Path) -> str:
    trainer = trainer_of(layout, path, run_dir)
    parameter = next(iter(optimizer_of(trainer).module.parameters()))
    parameter.register_hook(lambda grad: grad * torch.inf if layout.rank == 1 else grad)
    try:
        trainer.train(batch_of(0))
    except NonFiniteError as error:
        return str(error)
    return "trained"


def test_a_gradient_that_is_not_finite_on_one_rank_stops_every_rank(model_directory: Any, tmp_path: Path) -> None:
    for outcome in run_ranks(train_with_infinite_gradient, model_directory("qwen3"), tmp_path, world_size=2):
        assert "the gradient norm is" in outcome
    assert (tmp_path / "failures" / "rollout-000000.safetensors").exists()


def train_at(layout: RankLayout, path: Path, run_dir: Path, lr: float, fault: float | None) -> str:
    trainer = trainer_of(layout, path, run_dir, lr=lr, lr_warmup_steps=0, minibatches=2, on_nonfinite="skip")
    if fault is not None and layout.rank == layout.world_size - 1:
        optimizer, step = optimizer_of(trainer), optimizer_of(trainer).step

        def corrupt(lr: float, grad_norm: float) -> None:
            step(lr, grad_norm)
            next(optimizer.module.parameters()).data.view(-1)[3] = fault

        optimizer.step = corrupt  # type: ignore[method-assign]
    try:
        for number in range(STEPS):
            trainer.train(batch_of(number))
    except NonFiniteError as error:
        return str(error)
    return f"trained, {trainer.backend.growth():.1f}"


@pytest.mark.parametrize("layout", [{}, {"world_size": 2}, {"world_size": 2, "tensor_parallel": 2}])
@pytest.mark.parametrize("lr", [1e3, 1e12, 1e30])
def test_weights_that_diverge_end_the_training_at_the_step_that_made_them(
    model_directory: Any, tmp_path: Path, lr: float, layout: dict[str, int]
) -> None:
    for told in run_ranks(train_at, model_directory("qwen3"), tmp_path, lr, None, **layout):
        assert f"after rollout 0 at learning rate {lr:g}: the training has diverged. They are neither" in told
        assert str(tmp_path / "failures" / "rollout-000000.safetensors") in told


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_one_weight_that_is_not_finite_on_one_rank_ends_the_training_of_all(
    model_directory: Any, tmp_path: Path, fault: float
) -> None:
    for told in run_ranks(train_at, model_directory("qwen3"), tmp_path, 1e-3, fault, world_size=2, tensor_parallel=2):
        assert "weights are not finite any more, after rollout 0" in told


@pytest.mark.parametrize("lr", [1e-5, 1e-3, 0.1, 1.0])
def test_a_learning_rate_that_is_large_at_the_beginning_is_no_divergence(
    model_directory: Any, tmp_path: Path, lr: float
) -> None:
    [told] = run_ranks(train_at, model_directory("qwen3"), tmp_path, lr, None)
    assert told.startswith("trained, ")
    assert float(told.split()[1]) < 20


def train_with_resets(layout: RankLayout, path: Path, resets: bool) -> dict[str, Tensor]:
    trainer = trainer_of(layout, path)
    trainer.train_sft(batch_of(0), lr=1e-3)
    if resets:
        trainer.backend.reset_optimizer()
    before = weights_of(trainer)
    trainer.train_sft(batch_of(1), lr=1e-3)
    return {name: tensor - before[name] for name, tensor in weights_of(trainer).items()}


def test_a_reset_optimizer_steps_as_if_it_were_new(model_directory: Any) -> None:
    path = model_directory("qwen3")
    [fresh] = run_ranks(train_with_resets, path, True)
    [carried] = run_ranks(train_with_resets, path, False)
    norms = "model.layers.0.input_layernorm.weight"  # no weight decay: a first Adam step is lr in size
    assert torch.allclose(fresh[norms].abs(), torch.tensor(1e-3), rtol=0.01)
    assert not torch.allclose(carried[norms].abs(), torch.tensor(1e-3), rtol=0.01)


def train_in_turns(layout: RankLayout, path: Path, dtype: str) -> dict[str, Any]:
    """Two turns, the first without moments, on a CPU that plays the device."""
    trainer = learner_of(layout, model={"path": path, "dtype": dtype}, train=TRAIN)
    optimizer = optimizer_of(trainer)
    gathered = parallel_state.get_global_memory_buffer().buffer
    calls: list[tuple[str, int, int, int]] = []

    def held(tensors: Iterable[Tensor]) -> int:
        return sum({t.untyped_storage()._cdata: t.untyped_storage().size() for t in tensors}.values())

    def noted(name: str) -> Callable[[], None]:
        """Each call with the bytes of gradients, Adam's own state and gathered tokens that the device holds then."""
        gradients = [buffer.grad_data for buffer in optimizer.module.buffers]

        def note() -> None:
            own = apart_from(optimizer._state_tensors(), optimizer.module.parameters())
            calls.append((name, held(gradients), held(own), held(gathered.values())))

        return note

    for name in ("synchronize", "ipc_collect", "empty_cache"):
        setattr(torch.cuda, name, noted(name))
    facts: dict[str, Any] = {"same": [], "kept": [], "gone": [], "pinned": [], "gathered": [], "calls": calls}
    for step in range(2):
        optimizer.offload(keep_weights=True)
        weights = weights_of(trainer)
        facts["kept"].append(held(optimizer.module.parameters()) > 0)
        optimizer.offload(keep_weights=True)
        optimizer.offload(keep_weights=False)
        facts["gone"].append(held(optimizer.module.parameters()))
        optimizer.onload()
        optimizer.onload()
        facts["same"].append(all(torch.equal(weights[name], t) for name, t in weights_of(trainer).items()))
        facts["pinned"].append([block.data_ptr() for block in optimizer._host._blocks])
        trainer.train_sft(batch_of(step), lr=2e-3)
        facts["gathered"].append(held(gathered.values()) > 0)
    facts["weights"] = weights_of(trainer)
    return facts


def train_without_turns(layout: RankLayout, path: Path, dtype: str) -> dict[str, Tensor]:
    trainer = learner_of(layout, model={"path": path, "dtype": dtype}, train=TRAIN)
    for step in range(2):
        trainer.train_sft(batch_of(step), lr=2e-3)
    return weights_of(trainer)


@pytest.mark.parametrize(
    ("world", "dtype"),
    [
        ({}, "bfloat16"),
        ({"world_size": 2}, "float32"),
        ({"world_size": 2}, "bfloat16"),
        ({"world_size": 2, "tensor_parallel": 2}, "bfloat16"),
    ],
    ids=["one rank", "DP in float32", "DP", "TP"],
)
def test_weights_leave_last_and_all_comes_back_as_it_was(
    model_directory: Any, world: dict[str, int], dtype: str
) -> None:
    path = model_directory("qwen3")
    [expected, *_] = run_ranks(train_without_turns, path, dtype, **world)
    for facts in run_ranks(train_in_turns, path, dtype, **world):
        assert facts["kept"] == [True, True], "published from freed memory"
        assert facts["gone"] == [0, 0] and facts["same"] == [True, True]
        assert facts["pinned"][0] == facts["pinned"][1], "memory is made once"
        order = [name for name, *_ in facts["calls"]]
        offload = ["synchronize", "ipc_collect", "empty_cache"]
        assert order == [*offload * 3, "synchronize", "synchronize"] * 2
        assert facts["gathered"] == ["tensor_parallel" in world] * 2
        assert not any(any(call[1:]) for call in facts["calls"] if call[0] != "synchronize"), "gone before it is freed"
        assert all(torch.equal(facts["weights"][name], tensor) for name, tensor in expected.items())


def train_in_bfloat16(layout: RankLayout, path: Path, dtype: str) -> tuple[list[float], set[str]]:
    trainer = learner_of(layout, model={"path": path, "dtype": dtype}, train=TRAIN)
    losses = [trainer.train_sft(batch_of(0), lr=1e-3)["train/loss"] for _ in range(STEPS)]
    return losses, {str(tensor.dtype) for _, tensor in trainer.backend.export_tensors()}


@pytest.mark.parametrize("world", [{"world_size": 2}, {"world_size": 2, "tensor_parallel": 2}], ids=["DP", "TP"])
def test_bfloat16_follows_float32_with_main_weights_of_its_own(model_directory: Any, world: dict[str, int]) -> None:
    path = model_directory("qwen3-tied")
    [(exact, _)] = run_ranks(train_in_bfloat16, path, "float32")
    for losses, dtypes in run_ranks(train_in_bfloat16, path, "bfloat16", **world):
        assert dtypes == {"torch.bfloat16"}
        assert losses == pytest.approx(exact, rel=0.01)
    assert exact[-1] < exact[0]


def train_in_a_thread(layout: RankLayout, path: Path) -> float:
    with ThreadPoolExecutor(1) as thread:
        trainer = thread.submit(trainer_of, layout, path).result()
        return thread.submit(trainer.train, batch_of(0)).result()["train/loss"]


def test_it_trains_in_a_thread_that_is_not_the_main_one(model_directory: Any) -> None:
    path = model_directory("qwen3")
    [[(metrics, _)], [loss]] = [run_ranks(train_grpo, path, {}), run_ranks(train_in_a_thread, path)]
    assert loss == metrics[0]["train/loss"]


def train_at_zero_lr(layout: RankLayout, path: Path) -> bool:
    trainer = trainer_of(layout, path, lr=0.0)
    before = weights_of(trainer)
    trainer.train(batch_of(0))
    return all(torch.equal(before[name], tensor) for name, tensor in trainer.backend.export_tensors())


def test_at_learning_rate_zero_no_bit_changes(model_directory: Any) -> None:
    assert run_ranks(train_at_zero_lr, model_directory("qwen3-tied")) == [True]


def train_on_nothing(layout: RankLayout, path: Path) -> list[dict[str, float]]:
    trainer = trainer_of(layout, path)
    masked = make_batch([(3, 5), (2, 2)], loss_mask=torch.zeros(7, dtype=torch.bool))
    return [trainer.train(make_batch([(3, 0), (2, 0)])), trainer.train(masked)]


def test_a_batch_without_a_trained_token_changes_nothing_and_says_so(model_directory: Any) -> None:
    for result in run_ranks(train_on_nothing, model_directory("qwen3"), world_size=2):
        for metrics in result:
            assert (metrics["train/updates"], metrics["train/trained_tokens"]) == (0, 0)
            assert "train/loss" not in metrics


def train_on_foreign_tokens(layout: RankLayout, path: Path) -> str:
    trainer = trainer_of(layout, path)
    try:
        trainer.train(make_batch([(3, 200)], vocab_size=102))
    except DataError as error:
        return str(error)
    return "trained"


def test_token_ids_outside_the_vocabulary_are_refused(model_directory: Any) -> None:
    for outcome in run_ranks(train_on_foreign_tokens, model_directory("qwen3"), world_size=2, tensor_parallel=2):
        assert "token id 101 is outside the model's vocabulary of 101" in outcome
