"""Baselines by group, checked by hand."""

from __future__ import annotations

import pytest
import torch

from asyncrl.algorithms.advantages import group_advantages, groups_without_signal


def advantages(rewards: list[float], groups: list[int], normalize: bool) -> list[float]:
    return group_advantages(torch.tensor(rewards), torch.tensor(groups), normalize=normalize).tolist()


def test_dr_grpo_subtracts_the_mean_of_the_group() -> None:
    assert advantages([1, 0, 0, 1, 3, 5], [0, 0, 0, 0, 1, 1], False) == [0.5, -0.5, -0.5, 0.5, -1, 1]


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    # rewards 1, 0, 0: mean 1/3, deviations 2/3, -1/3, -1/3, variance (4 + 1 + 1) / 9 / 2 = 1/3
    assert advantages([1, 0, 0], [0, 0, 0], True) == pytest.approx(
        [2 / 3 * 3**0.5, -(3**0.5) / 3, -(3**0.5) / 3], rel=1e-5
    )


def test_a_missing_sample_leaves_the_others_of_its_group_their_own_mean() -> None:
    # group 0 lost one of four samples; its mean is over three, and group 1 is not touched
    assert advantages([1, 1, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1], False) == pytest.approx(
        [1 / 3, 1 / 3, -2 / 3, -0.5, 0.5, 0.5, -0.5]
    )


def test_the_order_of_samples_does_not_matter() -> None:
    rewards, groups = [1.0, 0.0, 4.0, 2.0, 0.0, 0.0], [0, 0, 7, 7, 0, 7]
    order = [3, 5, 0, 2, 4, 1]
    shuffled = advantages([rewards[i] for i in order], [groups[i] for i in order], True)
    expected = advantages(rewards, groups, True)
    assert shuffled == pytest.approx([expected[i] for i in order])


def test_the_same_prompt_in_two_groups_has_two_baselines() -> None:
    assert advantages([1, 0, 1, 1], [0, 0, 1, 1], False) == [0.5, -0.5, 0, 0]


@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_and_lone_samples_get_exactly_zero(normalize: bool) -> None:
    assert advantages([0.1, 0.1, 0.1, 5.0], [0, 0, 0, 1], normalize) == [0, 0, 0, 0]
    assert advantages([], [], normalize) == []


def test_rewards_that_differ_by_rounding_alone_stay_small() -> None:
    assert max(map(abs, advantages([0.3, 0.1 + 0.2 + 1e-8, 0.3], [0, 0, 0], True))) < 0.1


def test_groups_without_signal_are_counted() -> None:
    assert groups_without_signal(torch.tensor([1.0, 1.0, 0.0, 1.0, 3.0]), torch.tensor([4, 4, 2, 2, 9])) == 2
    assert groups_without_signal(torch.zeros(0), torch.zeros(0, dtype=torch.int64)) == 0
