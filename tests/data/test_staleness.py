from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.sample import Prompt, Sample, SampleGroup, Turn, VersionSpan
from asyncrl.data.staleness import Bound, oldest_step, step_of
from asyncrl.errors import StalenessError

IDS = np.arange(4, dtype=np.int32)


def batch(rollout_id: int, *versions: str) -> RolloutBatch:
    """One group of two samples. `versions` made the tokens of the second in turn; the newest made the first."""
    samples = []
    for index, made_by in enumerate((versions[-1:], versions)):
        spans = tuple(VersionSpan(version, at, at + 1) for at, version in enumerate(made_by))
        ids = IDS[: len(made_by)]
        turn = Turn(IDS, ids, np.zeros(len(ids), np.float32), spans)
        samples.append(Sample.of_turn(f"g7.{index}", "g7", turn, finish_reason="stop", text="", reward=1.0))
    return RolloutBatch.from_groups(rollout_id, [SampleGroup("g7", Prompt("p", "", IDS), tuple(samples))], 1.0)


@pytest.mark.parametrize(
    ("version", "step"), [("0.0", 0), ("12.345", 345), ("default", None), ("", None), ("1.", None)]
)
def test_a_version_tells_the_step_of_its_weights(version: str, step: int | None) -> None:
    assert step_of(version) == step
    assert oldest_step([VersionSpan("3.999", 0, 1), VersionSpan(version, 1, 2)]) == step


@given(
    max_staleness=st.integers(0, 12),
    optimizer_steps=st.integers(1, 4),
    rollout_id=st.integers(0, 9),
    step=st.integers(0, 9),
)
def test_exactly_what_is_within_the_bound_passes(
    max_staleness: int, optimizer_steps: int, rollout_id: int, step: int
) -> None:
    bound = Bound(max_staleness, optimizer_steps)
    # The definition: optimizer steps between the weights and the last step of the batch.
    behind = (rollout_id * optimizer_steps + optimizer_steps - 1) - step * optimizer_steps
    assert bound.staleness(rollout_id, step) == behind
    try:
        bound.check(batch(rollout_id, f"0.{step}"))
    except StalenessError:
        assert behind > max_staleness or step > rollout_id
    else:
        assert behind <= max_staleness and step <= rollout_id


def test_the_error_names_group_tokens_weights_and_the_arithmetic() -> None:
    with pytest.raises(
        StalenessError,
        match=r"group g7, sample g7\.1: tokens 4-5 were made by weights '0\.2' and must not train batch 4: their "
        r"staleness is 2 \* \(4 - 2 \+ 1\) - 1 = 5 optimizer steps, and rollout\.max_staleness is 4",
    ):
        Bound(4, 2).check(batch(4, "0.2", "0.3"))
    Bound(4, 2).check(batch(4, "0.3", "0.4"))


@pytest.mark.parametrize(("version", "why"), [("0.5", "was rolled back"), ("default", "not a version of this job")])
def test_weights_of_another_history_train_nothing(version: str, why: str) -> None:
    with pytest.raises(StalenessError, match=why):
        Bound(9, 1).check(batch(4, version))


def test_samples_without_spans_have_nothing_to_check() -> None:
    supervised = batch(3, "0.3")
    Bound(0, 1).check(replace(supervised, versions=((), ())))


@pytest.mark.parametrize(
    ("train", "asked", "expected", "batches"),
    [
        ({}, None, 0, 0),
        ({"minibatches": 2}, None, 1, 0),
        ({"update_weights_interval": 3}, None, 2, 2),
        ({"minibatches": 2, "update_weights_interval": 3}, None, 5, 2),
        ({}, 3, 3, 3),
        ({"minibatches": 2}, 4, 4, 1),
        ({"minibatches": 2}, 5, 5, 2),
        ({"batch_epochs": 2}, None, 1, 0),
        ({"minibatches": 2, "batch_epochs": 3}, 10, 10, 0),
        ({"minibatches": 2, "batch_epochs": 3}, 11, 11, 1),
    ],
)
def test_the_bound_of_a_job_is_the_least_that_works_unless_told(
    train: dict[str, int], asked: int | None, expected: int, batches: int
) -> None:
    bound = Bound.of(Config.model_validate({"train": train, "rollout": {"max_staleness": asked}}))
    assert (bound.max_staleness, bound.batches) == (expected, batches)


@given(minibatches=st.integers(1, 4), epochs=st.integers(1, 4), interval=st.integers(1, 4))
def test_the_least_bound_is_the_lag_of_a_loop_that_generates_nothing_ahead(
    minibatches: int, epochs: int, interval: int
) -> None:
    train = {"minibatches": minibatches, "batch_epochs": epochs, "update_weights_interval": interval}
    config = Config.model_validate({"train": train})
    taken = published = largest = 0
    for rollout_id in range(2 * interval):
        for _ in range(epochs):
            for _ in range(minibatches):
                largest = max(largest, taken - published)
                taken += 1
        if config.train.publishes(rollout_id):
            published = taken
    bound = Bound.of(config)
    assert (bound.max_staleness, bound.batches) == (largest, interval - 1)
    bound.check(batch(interval - 1, "0.0"))
