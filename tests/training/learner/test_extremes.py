from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asyncrl.training.learner.extremes import describe_extremes
from tests.training.batches import make_batch

BATCH = make_batch([(2, 3), (2, 3), (2, 3), (2, 3)], rewards=[0.0, 1.0, 0.0, 1.0])


def test_a_batch_without_extremes_says_so_with_its_ranges() -> None:
    told = describe_extremes(BATCH, [0, 1, 2, 3], {"ratio_max": 1.5})
    assert told.startswith("nothing in it is extreme (reward 0 to 1, log-prob of the engine -")
    assert "train.lr" in told


@pytest.mark.parametrize("value", [3e38, -1e5, float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["reward", "log-prob of the engine", "advantages"])
def test_whatever_is_extreme_is_named_with_its_sample(where: str, value: float) -> None:
    sample_2 = BATCH.sampled & (BATCH.token_samples == 2)
    batch = {
        "reward": replace(BATCH, rewards=torch.tensor([0.0, 1.0, value, 1.0])),
        "log-prob of the engine": replace(BATCH, logprobs=BATCH.logprobs.masked_fill(sample_2, value)),
        "advantages": replace(BATCH, columns={"advantages": torch.zeros(20).masked_fill(sample_2, value)}),
    }[where]
    told = describe_extremes(batch, [0, 1, 2, 3], {"ratio_max": 1.5})
    assert told == f"extreme in it: {where} {value:.4g} in sample sample-2"
    assert "nothing in it is extreme" in describe_extremes(batch, [0, 1, 3], {}), "only what the step trains counts"


def test_a_ratio_that_overflowed_is_extreme() -> None:
    assert describe_extremes(BATCH, [0], {"ratio_max": float("inf")}) == "extreme in it: ratio_max inf"
