"""Figures of micro-batches and ranks add up to one tally."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from asyncrl.errors import AlgorithmError
from asyncrl.training.learner.tally import Figures, Tally, tally
from asyncrl.training.ranks.layout import RankLayout
from tests.training.forked_ranks import run_ranks


def figures(sums: dict[str, float], maxima: dict[str, float]) -> Figures:
    return Figures.of(*({name: torch.tensor(x) for name, x in values.items()} for values in (sums, maxima)))


def of_two_micro_batches(layout: RankLayout) -> tuple[Tally, Tally, str]:
    assert dist.group.WORLD is not None
    first = figures({"loss": 1.5, "tokens": 3 + layout.rank}, {"ratio": 1.0, "step": -5.0 * (1 + layout.rank)})
    second = figures({"tokens": 4, "loss": -0.25}, {"step": -7.0, "ratio": 2.0 + layout.rank})
    total = tally([first, second], dist.group.WORLD)
    without_maxima = tally([figures({"loss": math.inf}, {})], dist.group.WORLD)
    with pytest.raises(AlgorithmError) as error:
        tally([first, figures({"loss": 1.0}, {"ratio": 1.0})], dist.group.WORLD)
    return total, without_maxima, str(error.value)


def test_sums_and_maxima_are_of_all_micro_batches_and_ranks_in_whatever_order_they_are_named() -> None:
    for total, without_maxima, error in run_ranks(of_two_micro_batches, world_size=2):
        assert total == Tally({"loss": 2.5, "tokens": 15.0}, {"ratio": 3.0, "step": -5.0})
        assert without_maxima == Tally({"loss": math.inf}, {})
        assert "loss, ratio for one micro-batch and loss, tokens, ratio, step for another" in error


def test_figures_let_the_graph_of_a_micro_batch_go() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    assert not Figures.of({"loss": loss}, {"ratio": loss}).sums.requires_grad
