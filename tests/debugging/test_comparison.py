"""What a replay says: the same, or what differs and where."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncrl.debugging.comparison import StepComparison, compare_logprobs, compare_metrics, verdict
from tests.training.worlds import make_batch

RECORDED = {"step": 3, "train/loss": 0.5, "train/grad_norm": 2.0, "rollout/reward_mean": 1.0, "train/gone": 1.0}


def step(replayed: dict[str, float], recorded: dict[str, Any] = RECORDED, number: int = 3) -> StepComparison:
    batch = make_batch()
    return StepComparison(number, compare_metrics(recorded, replayed), compare_logprobs(batch, batch.logprobs), 1e-4)


def test_what_is_the_same_to_within_the_tolerance_is_said_to_be_so() -> None:
    same = step({"train/loss": 0.5, "train/grad_norm": 2.0 + 1e-5, "train/new": 3.0})
    assert [d.name for d in same.metrics] == ["train/grad_norm", "train/loss"] and not same.differing
    assert same.in_words().startswith("step 3: as recorded; trainer and engine differ by 0.0e+00 nat a token")
    assert verdict([same]) == (
        "1 step replayed, all as recorded within 0.0001 "
        "(largest relative difference 5.0e-06, train/grad_norm of step 3)"
    )


def test_what_differs_is_named_with_both_values_the_worst_first() -> None:
    other = step({"train/loss": 0.4, "train/grad_norm": 2.01})
    assert [d.name for d in other.differing] == ["train/loss", "train/grad_norm"]
    assert "train/loss was 0.5, is 0.4 (2.0e-01); train/grad_norm was 2, is 2.01 (5.0e-03)" in other.in_words()
    told = verdict([step({"train/loss": 0.5}, number=2), other])
    assert told.startswith("1 of 2 replayed steps differ, the first is step 3 (largest relative difference 2.0e-01")


@pytest.mark.parametrize(
    ("recorded", "replayed", "relative"),
    [(None, math.nan, 0.0), (None, 1.0, math.inf), (1.0, math.nan, math.inf), (0.0, 0.0, 0.0), (0.0, 1e-9, 1.0)],
)
def test_a_loss_that_is_no_number_is_the_same_only_as_another(
    recorded: float | None, replayed: float, relative: float
) -> None:
    [difference] = compare_metrics({"train/loss": recorded}, {"train/loss": replayed})
    assert difference.relative == relative


def test_where_nothing_was_recorded_there_is_nothing_to_be_the_same_as() -> None:
    alone = step({"train/loss": 0.5}, recorded={})
    assert "nothing was recorded of it" in alone.in_words() and alone.as_record()["same"] is None
    assert "nothing was recorded" in verdict([alone])


@pytest.mark.parametrize(("token", "sample_id", "place"), [(2, "s0", 0), (3, "s0", 1), (7, "s1", 0), (8, "s1", 1)])
def test_the_token_at_which_trainer_and_engine_part_is_found(token: int, sample_id: str, place: int) -> None:
    batch = make_batch()
    logprobs = batch.logprobs.clone()
    logprobs[token] += 0.5
    logprobs[4] += 9.0  # is not trained
    found = compare_logprobs(batch, logprobs)
    assert found is not None and (found.sample_id, found.token) == (sample_id, place)
    assert found.largest == pytest.approx(0.5) and found.mean == pytest.approx(0.5 / 4)
    logprobs[8] = math.nan
    found = compare_logprobs(batch, logprobs)
    assert found is not None and (found.sample_id, found.token) == ("s1", 1) and math.isnan(found.largest)


def test_a_batch_in_which_nothing_is_trained_has_no_worst_token() -> None:
    batch = replace(make_batch(), loss_mask=torch.zeros(9, dtype=torch.bool))
    assert compare_logprobs(batch, batch.logprobs) is None
