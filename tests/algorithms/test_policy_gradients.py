"""Every policy gradient against its formula in float64 (`reference.py`): loss and gradient, on batches of any shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algorithms.algorithm import OLD_LOGPROBS, TokenInputs, role_logprobs
from asyncrl.algorithms.chosen import POLICY_GRADIENTS, ChosenAlgorithm, make_algorithm
from asyncrl.algorithms.off_policy import mismatch
from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.errors import AlgorithmError
from tests.algorithms import reference
from tests.training.batches import make_batch

LIMIT = 6
NAMES = sorted(POLICY_GRADIENTS)


@dataclass(frozen=True)
class Policy:
    """Log-probs [T] of a batch under the weights that train, and before the step; and entropies."""

    logprobs: Tensor
    old: Tensor
    entropies: Tensor
    frozen: Tensor
    """Under the reference, and under the teacher."""


def draw(seed: int, spread: float = 0.3) -> tuple[RolloutBatch, Policy]:
    """A batch of groups of one to four samples, of one or two sequences each, with some tokens masked out."""
    rng = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high + 1, (count,), generator=rng).tolist()

    sizes = integers(1, 4, 3)
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    sequences = integers(1, 2, len(groups))
    sample_index = [i for i, n in enumerate(sequences) for _ in range(n)]
    order = torch.randperm(len(sample_index), generator=rng).tolist()
    sample_index = [sample_index[i] for i in order]
    responses = integers(1, LIMIT, len(sample_index))
    lengths = list(zip(integers(1, 3, len(sample_index)), responses, strict=True))
    batch = make_batch(lengths, groups=[0] * len(lengths), rollout_id=seed)
    mask = batch.sampled & (torch.rand(len(batch.tokens), generator=rng) > 0.2)
    if not mask.any():
        mask = batch.sampled
    rewards = torch.randint(0, 3, (len(groups),), generator=rng).float()
    batch = replace(
        batch,
        sample_index=torch.tensor(sample_index),
        sample_ids=tuple(f"sample-{i}" for i in range(len(groups))),
        group_index=torch.tensor(groups),
        group_ids=tuple(f"group-{g}" for g in range(len(sizes))),
        rewards=rewards,
        truncated=torch.rand(len(groups), generator=rng) > 0.7,
        loss_mask=mask,
    )

    def moved() -> Tensor:
        return batch.logprobs + spread * torch.randn(len(batch.tokens), generator=rng)

    policy = Policy(moved(), moved(), torch.rand(len(batch.tokens), generator=rng), moved())
    columns = {role_logprobs(role): policy.frozen for role in ("reference", "teacher")}
    return replace(batch, columns=columns), policy


def made(name: str, **section: Any) -> ChosenAlgorithm:
    rollout = {"max_new_tokens": LIMIT, "samples_per_prompt": 4}
    return make_algorithm(
        Config.model_validate(
            {"train": {"algorithm": name}, "algorithm": {"teacher": "models/teacher", **section}, "rollout": rollout}
        )
    )


def step(
    algorithm: ChosenAlgorithm, batch: RolloutBatch, policy: Policy, cuts: Iterable[Sequence[int]] | None = None
) -> tuple[float, Tensor]:
    """Loss and gradient [T] of one optimizer step, as the learner adds them up over micro-batches of sequences."""
    columns = algorithm.columns(batch)
    if columns.keep is not None:
        batch = replace(batch, loss_mask=batch.loss_mask & columns.keep)
    recomputed = {OLD_LOGPROBS: policy.old} if algorithm.needs.old_logprobs else {}
    everything = {**batch.columns, **columns.tokens, **recomputed}
    weights = algorithm.needs.aggregation.weights(batch, range(batch.num_sequences))
    owner = torch.arange(batch.num_sequences).repeat_interleave(batch.sequence_lengths)
    logprobs, total, count = policy.logprobs.clone().requires_grad_(), 0.0, 0
    for sequences in [range(batch.num_sequences)] if cuts is None else cuts:
        places = (torch.isin(owner, torch.tensor(list(sequences))) & batch.sampled).nonzero().flatten()
        samples = batch.sample_index[owner[places]]
        tokens = TokenInputs(
            logprobs=logprobs[places],
            entropies=policy.entropies[places],
            engine_logprobs=batch.logprobs[places],
            mask=batch.loss_mask[places],
            columns={key: column[places] for key, column in everything.items()},
            sequence=owner[places],
            sample=samples,
            group=batch.group_index[samples],
            weights=torch.ones(len(places)) if weights is None else weights[places],
            num_sequences=batch.num_sequences,
        )
        loss = algorithm.loss(tokens).loss
        loss.backward()  # type: ignore[no-untyped-call]
        total, count = total + loss.item(), count + int(tokens.mask.sum())
    assert logprobs.grad is not None
    return total / max(count, 1), logprobs.grad / max(count, 1)


def expected(name: str, batch: RolloutBatch, policy: Policy, **options: Any) -> tuple[float, Tensor]:
    starts = (batch.sequence_lengths.cumsum(0) - batch.sequence_lengths).tolist()
    responses = []
    for start, length, sample in zip(starts, batch.sequence_lengths.tolist(), batch.sample_index.tolist(), strict=True):
        places = tuple(p for p in range(start, start + length) if batch.loss_mask[p])
        responses.append(reference.Response(sample, int(batch.group_index[sample]), places))
    sampled = [0] * batch.num_samples
    for sample, length in zip(batch.sample_index.tolist(), batch.sampled_lengths.tolist(), strict=True):
        sampled[sample] = max(sampled[sample], length)  # each sequence has one turn
    case = reference.Case(
        responses,
        batch.rewards.tolist(),
        batch.group_index.tolist(),
        sampled,
        batch.truncated.tolist(),
        LIMIT,
    )
    logprobs = policy.logprobs.double().requires_grad_()
    loss = reference.loss(
        name,
        case,
        options,
        logprobs,
        policy.entropies.double(),
        batch.logprobs.double(),
        policy.old.double(),
        policy.frozen.double(),
    )
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad


def assert_same(got: tuple[float, Tensor], want: tuple[float, Tensor], rel: float = 1e-4) -> None:
    assert got[0] == pytest.approx(want[0], rel=rel, abs=2e-6)
    torch.testing.assert_close(got[1].double(), want[1].double(), rtol=rel, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=40)
def test_loss_and_gradient_are_those_of_the_formula(name: str, seed: int) -> None:
    batch, policy = draw(seed)
    assert_same(step(made(name), batch, policy), expected(name, batch, policy))


OPTIONS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    *(({"aggregation": unit}, {"unit": unit}) for unit in ("token", "sequence", "fixed", "group")),
    ({"entropy_bonus": 0.05}, {"entropy_bonus": 0.05}),
    ({"truncated_weight": 0.0}, {"truncated": 0.0}),
    ({"truncated_weight": 0.25}, {"truncated": 0.25}),
    ({"overlong_tokens": 4}, {"overlong": 4}),
    ({"old_logprobs": "trainer"}, {"old": "trainer"}),
    *(
        ({"kl": where, "kl_estimator": estimator, "kl_coefficient": 0.5},) * 2
        for where in ("loss", "reward")
        for estimator in ("k1", "k2", "k3", "unbiased")
    ),
    ({"teacher_weight": 0.3}, {"teacher_weight": 0.3}),
    *(
        (
            {"correction": kind, "correction_level": level, "correction_upper": 1.3, "correction_lower": 0.7},
            {"correction": kind, "level": level, "upper": 1.3, "lower": 0.7},
        )
        for kind in ("truncate", "mask")
        for level in ("token", "sequence", "geometric")
    ),
)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "reinforce_pp"])
@pytest.mark.parametrize(("section", "options"), OPTIONS, ids=[str(section) for section, _ in OPTIONS])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=8)
def test_each_setting_does_to_each_loss_what_its_formula_says(
    name: str, section: dict[str, Any], options: dict[str, Any], seed: int
) -> None:
    batch, policy = draw(seed)
    assert_same(step(made(name, **section), batch, policy), expected(name, batch, policy, **options))


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp"])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=20)
def test_a_dual_clip_bounds_what_a_bad_token_may_cost(name: str, seed: int) -> None:
    batch, policy = draw(seed, spread=1.5)
    assert_same(step(made(name, dual_clip=2.0), batch, policy), expected(name, batch, policy, dual_clip=2.0))


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10_000), data=st.data())
@settings(max_examples=15)
def test_no_cut_into_micro_batches_changes_anything(name: str, seed: int, data: st.DataObject) -> None:
    batch, policy = draw(seed)
    order = data.draw(st.permutations(range(batch.num_sequences)))
    at = data.draw(st.integers(1, len(order)))
    algorithm = made(name, correction="truncate", correction_level="geometric")
    cuts = [part for part in (order[:at], order[at:]) if part]
    assert_same(step(algorithm, batch, policy, cuts), step(algorithm, batch, policy), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10_000), shift=st.floats(-50, 50))
@settings(max_examples=15)
def test_rewards_that_are_all_larger_by_one_number_change_nothing(name: str, seed: int, shift: float) -> None:
    batch, policy = draw(seed)
    exact = round(shift * 4) / 4  # no rounding of its own
    moved = replace(batch, rewards=batch.rewards + exact)
    assert_same(step(made(name), moved, policy), step(made(name), batch, policy), rel=1e-4)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "reinforce_pp"])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=10)
def test_a_group_whose_rewards_are_all_larger_changes_nothing_where_groups_are_compared(name: str, seed: int) -> None:
    batch, policy = draw(seed)
    moved = replace(batch, rewards=batch.rewards + (batch.group_index == 0) * 8.0)
    assert_same(step(made(name), moved, policy), step(made(name), batch, policy), rel=1e-4)


def test_one_sample_twice_counts_twice() -> None:
    one = make_batch([(2, 3), (2, 3)], groups=[0, 0], rewards=[1.0, 0.0])
    twice = make_batch([(2, 3), (2, 3), (2, 3)], groups=[0, 0, 0], rewards=[1.0, 0.0, 0.0])
    policy = Policy(twice.logprobs, twice.logprobs, torch.zeros(15), torch.zeros(15))
    loss, gradient = step(made("dr_grpo"), twice, policy)
    assert gradient[:5].tolist() == pytest.approx([0, 0, *[-(2 / 3) / (3 * LIMIT)] * 3])
    policy = Policy(one.logprobs, one.logprobs, torch.zeros(10), torch.zeros(10))
    assert step(made("dr_grpo"), one, policy)[1][:5].tolist() == pytest.approx([0, 0, *[-0.5 / (2 * LIMIT)] * 3])
    assert loss == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_which_nothing_is_trained_has_a_loss_of_zero(name: str) -> None:
    batch, policy = draw(1)
    nothing = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    loss, gradient = step(made(name), nothing, policy)
    assert loss == 0.0 and not gradient.any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_tokens_have_no_influence_whatever_they_hold(name: str, junk: float) -> None:
    batch, policy = draw(3)
    algorithm = made(name, entropy_bonus=0.1, correction="mask", correction_level="sequence")
    odd = torch.where(batch.loss_mask, policy.logprobs, junk)
    loss, gradient = step(algorithm, batch, replace(policy, logprobs=odd))
    want, wanted = step(algorithm, batch, policy)
    assert loss == want
    assert torch.equal(gradient[batch.loss_mask], wanted[batch.loss_mask]) and bool(gradient.isfinite().all())


def test_the_mismatch_is_measured_over_trained_tokens_and_by_their_staleness() -> None:
    difference, staleness = torch.tensor([0.0, math.log(2), -math.log(2)]), torch.tensor([0.0, 1.0, torch.nan])
    figures = mismatch(difference, staleness)
    assert figures["mismatch_k1"] == pytest.approx(0.0, abs=1e-7)
    assert figures["mismatch_k3"] == pytest.approx((2 + 0.5 - 2) / 3)
    assert figures["mismatch_ess"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert figures["mismatch_k3_staleness_0"] == 0.0
    assert figures["mismatch_k3_staleness_1"] == pytest.approx(1 - math.log(2))
    assert mismatch(torch.zeros(0), torch.zeros(0)) == {}


def test_a_function_of_your_own_takes_the_place_of_the_advantages_or_of_the_loss() -> None:
    batch = make_batch([(2, 3), (2, 1)], groups=[0, 0], rewards=[1.0, 0.5])
    zeros = torch.zeros(8)
    policy = Policy(batch.logprobs, batch.logprobs, zeros, zeros)
    own = "tests.algorithms.own:"
    _, gradient = step(made("rloo", advantage_function=f"{own}successes"), batch, policy)
    assert gradient.tolist() == pytest.approx([0, 0, *[-0.25 / 4] * 3, 0, 0, 0])
    _, gradient = step(made("rloo", advantage_function=f"{own}by_token"), batch, policy)
    assert gradient.tolist() == pytest.approx([0, 0, -2 / 4, -1 / 4, -1 / 4, 0, 0, -1 / 4])
    functions = {"advantage_function": f"{own}by_token", "loss_function": f"{own}reinforce"}
    loss, gradient = step(made("rloo", **functions, aggregation="sequence"), batch, policy)
    assert gradient.tolist() == pytest.approx([0, 0, -2 / 6, -1 / 6, -1 / 6, 0, 0, -1 / 2])
    assert loss == pytest.approx(float((gradient * batch.logprobs).sum()))


@pytest.mark.parametrize(
    ("setting", "function", "message"),
    [
        ("advantage_function", "few", "returned a tensor of shape [3], not one number for each of the 2 samples or of"),
        ("advantage_function", "endless", "returned 2 numbers that are not finite"),
        ("advantage_function", "nothing", "returned NoneType, not one number for each"),
        ("advantage_function", "failing", "failed: ValueError: boom"),
        ("loss_function", "few", "returned a tensor of shape [3], not a loss with gradient for each of the 4 tokens"),
        ("loss_function", "without_gradient", "returned a tensor of shape [4], not a loss with gradient"),
        ("loss_function", "failing", "failed: ValueError: boom"),
    ],
)
def test_a_function_of_your_own_that_cannot_be_trained_with_is_one_error(
    setting: str, function: str, message: str
) -> None:
    batch = make_batch([(2, 3), (2, 1)], groups=[0, 0], rewards=[1.0, 0.5])
    policy = Policy(batch.logprobs, batch.logprobs, torch.zeros(8), torch.zeros(8))
    with pytest.raises(AlgorithmError) as refused:
        step(made("grpo", **{setting: f"tests.algorithms.own:{function}"}), batch, policy)
    assert str(refused.value).startswith(f"algorithm.{setting}: tests.algorithms.own:{function} ")
    assert message in str(refused.value)


def test_a_long_conversation_of_short_responses_is_not_overlong() -> None:
    batch = make_batch([(1, 9), (1, 5)], groups=[0, 0], rewards=[1.0, 0.0])
    turns = torch.tensor([0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1], dtype=torch.bool)
    batch = replace(batch, sampled=turns, loss_mask=turns)
    columns = made("dr_grpo", overlong_tokens=2).columns(batch)
    assert columns.metrics["overlong_penalty"] == 0.5  # 5 tokens of 6 in the longest of both: half of the penalty
    assert "groups_without_signal" in columns.metrics
    assert "groups_without_signal" not in made("reinforce_pp").columns(batch).metrics


def test_advantages_of_a_wrong_shape_are_one_error() -> None:
    batch = replace(make_batch([(1, 2), (1, 3), (1, 1)], groups=[0] * 3), sample_index=torch.tensor([0, 0, 1]))
    batch = replace(batch, sample_ids=("a", "b"), group_index=torch.tensor([0, 0]), rewards=torch.tensor([1.0, 0.0]))
    batch = replace(batch, truncated=torch.zeros(2, dtype=torch.bool))
    config = {"train": {"algorithm": "tests.algorithms.own:BySequence"}, "rollout": {"samples_per_prompt": 2}}
    with pytest.raises(AlgorithmError, match=r"advantages of BySequence are of shape \[3\], not one for each of the 2"):
        make_algorithm(Config.model_validate(config)).columns(batch)
