"""The clipped policy gradient by hand, and its gradient against autograd of the formula written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.algorithm import TokenInputs, TokenLoss
from asyncrl.algorithms.grpo import Grpo
from asyncrl.algorithms.sft import Sft

ALL = torch.ones(4, dtype=torch.bool)


def inputs(logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, **columns: Tensor) -> TokenInputs:
    index, entropies = torch.zeros(len(logprobs), dtype=torch.int64), torch.zeros(len(logprobs))
    return TokenInputs(logprobs, entropies, engine_logprobs, mask, columns, index, index, index, ones(logprobs), 1)


def ones(like: Tensor) -> Tensor:
    return torch.ones(len(like))


def grpo(
    logprobs: Tensor, engine_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    return Grpo(clip_low=clip_low, clip_high=clip_high).loss(
        inputs(logprobs, engine_logprobs, mask, advantages=advantages)
    )


def sft(logprobs: Tensor, mask: Tensor) -> TokenLoss:
    return Sft().loss(inputs(logprobs, torch.zeros(len(logprobs)), mask))


def test_the_clip_binds_where_the_policy_already_moved_far_enough() -> None:
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5])
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0])
    logprobs = ratios.log().requires_grad_()
    result = grpo(logprobs, torch.zeros(4), advantages, ALL, clip_low=0.2, clip_high=0.28)
    # -min(r A, clip(r) A): 1.28 * 2 clipped; 1.5 * -2 kept; 0.5 * 2 kept; 0.8 * -2 clipped
    assert result.loss.item() == pytest.approx(-(1.28 * 2 + 1.5 * -2 + 0.5 * 2 + 0.8 * -2))
    assert result.sums["clip_fraction"].item() == 2
    assert result.sums["ratio_mean"].item() == pytest.approx(4.0)
    assert result.maxima["ratio_max"].item() == pytest.approx(1.5)
    assert result.sums["off_policy_drift"].item() == pytest.approx(
        2 * (0.5 - math.log(1.5)) + 2 * (-0.5 - math.log(0.5))
    )
    result.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 1.5 * 2, -0.5 * 2, 0.0])


def test_on_policy_the_gradient_is_minus_the_advantage() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 0.5, 0.0])
    grpo(logprobs, logprobs.detach(), advantages, ALL, clip_low=0.2, clip_high=0.2).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 1.0, -0.5, 0.0]


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_tokens_have_no_influence_whatever_they_hold(junk: float) -> None:
    logprobs = torch.tensor([-1.0, junk, -3.0, -4.0], requires_grad=True)
    mask = torch.tensor([True, False, True, True])
    result = grpo(logprobs, torch.full((4,), -2.0), torch.ones(4), mask, clip_low=0.2, clip_high=0.2)
    kept = torch.tensor([-1.0, -3.0, -4.0])
    alone = grpo(kept, torch.full((3,), -2.0), torch.ones(3), mask[mask], clip_low=0.2, clip_high=0.2)
    assert result.loss.item() == alone.loss.item()
    assert {k: v.item() for k, v in result.sums.items()} == {k: v.item() for k, v in alone.sums.items()}
    result.loss.backward()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[1] == 0
    assert sft(logprobs, mask).loss.item() == 8.0


def test_a_nan_that_is_trained_on_is_not_hidden() -> None:
    result = grpo(torch.tensor([math.nan]), torch.zeros(1), torch.ones(1), ALL[:1], clip_low=0.2, clip_high=0.2)
    assert math.isnan(result.loss.item())
