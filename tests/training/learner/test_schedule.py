"""The learning rate, step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.training.learner.schedule import learning_rate
from asyncrl.training.ranks.layout import RankLayout


def rates(steps: int, **schedule: Any) -> list[float]:
    return [learning_rate(step, peak=2.0, **schedule) for step in range(steps)]


def test_warm_up_rises_from_the_first_step_to_the_peak() -> None:
    assert rates(6, warmup_steps=4, decay="constant", total_steps=6) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_decay_would_be_zero_one_step_after_the_last() -> None:
    assert rates(5, warmup_steps=0, decay="linear", total_steps=4) == [2.0, 1.5, 1.0, 0.5, 0.0]


def test_cosine_decay_is_at_half_in_the_middle() -> None:
    got = rates(7, warmup_steps=2, decay="cosine", total_steps=6)
    assert got == pytest.approx([1.0, 2.0, 2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0])


def test_without_an_end_or_after_it_the_rate_is_never_negative() -> None:
    assert rates(3, warmup_steps=0, decay="linear", total_steps=None) == [2.0, 2.0, 2.0]
    assert rates(9, warmup_steps=0, decay="linear", total_steps=4)[-1] == 0.0
    assert rates(2, warmup_steps=4, decay="cosine", total_steps=2) == [0.5, 1.0]


def test_a_layout_places_tensor_parallel_ranks_side_by_side() -> None:
    layouts = [RankLayout(rank, 4, rank, 2) for rank in range(4)]
    assert [(x.data_parallel_rank, x.tensor_parallel_rank) for x in layouts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert layouts[0].data_parallel == 2


def test_ranks_that_do_not_fill_whole_copies_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel = 2 does not divide 3 ranks"):
        RankLayout(0, 3, 0, 2)
