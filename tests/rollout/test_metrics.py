from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from asyncrl.data.sample import Prompt, Sample, SampleGroup, Turn, VersionSpan
from asyncrl.data.staleness import Bound
from asyncrl.rollout.metrics import DeliveryMeter, Interval, RolloutMetrics, measure_rollout, most_common_failure
from asyncrl.rollout.scheduling.collection import Collection
from asyncrl.rollout.scheduling.group import Group, Issue
from asyncrl.rollout.scheduling.production import Taken

ONCE = Bound(0, optimizer_steps=1)
IDS = np.array([5, 6], np.int32)
TURN = Turn(IDS, IDS, np.array([-0.5, -0.5], np.float32), (VersionSpan("0.1", 0, 2),))
SAMPLE = Sample.of_turn("0.0", "0", TURN, finish_reason="stop", text="yes", reward=1.0)


def measured(
    *failures: str | None,
    dropped: str = "",
    rollout_id: int = 1,
    bound: Bound = ONCE,
    seconds: float = 2.0,
    period_s: float = 2.0,
    published_version: str | None = "0.1",
    parts: Sequence[dict[str, float]] = (),
) -> RolloutMetrics:
    samples = [SAMPLE if f is None else msgspec.structs.replace(SAMPLE, reward=None, failure=f) for f in failures]
    samples += [msgspec.structs.replace(SAMPLE, reward_parts=part) for part in parts]
    group = SampleGroup("0", Prompt("p:0", "1+1=", IDS), tuple(samples))
    collection = Collection(1, 8, 8)
    if dropped:
        collection.drop("only 0 of 4 samples usable", dropped)
    taken = Taken((Group(Issue(0, group.prompt, epoch=0), 0),), (group,), collection, ready=0)
    interval = Interval(seconds, period_s, failed_attempts=0, aborted_requests=0)
    return measure_rollout(rollout_id, taken, interval, concurrency=8, published_version=published_version, bound=bound)


def test_a_batch_names_what_most_of_its_failed_samples_failed_of() -> None:
    metrics = measured(None, "generation timeout: late", "ValueError: a (r.py:1)", "ValueError: b (r.py:1)")
    assert (metrics.samples, metrics.failed_samples, metrics.failure) == (1, 3, "ValueError: a (r.py:1)")
    assert measured(None).failure == ""
    replaced = measured(None, dropped="x: 1")
    assert (replaced.failure, replaced.dropped_groups) == ("x: 1", 1)


def test_staleness_counts_the_optimizer_steps_since_the_weights_of_each_token() -> None:
    assert (measured(None).staleness_mean, measured(None).staleness_max) == (0, 0)
    later = measured(None, rollout_id=3, published_version="0.3")
    assert (later.staleness_mean, later.staleness_max, later.off_version_fraction) == (2, 2, 1)
    twice = measured(None, rollout_id=3, bound=Bound(5, 2))
    assert (twice.staleness_mean, twice.staleness_max) == (4.5, 5), "steps 6 and 7 train what step 2 made"
    assert measured(None, rollout_id=3, published_version=None).staleness_max == 0, "such weights never change"


def test_throughput_goes_by_the_time_from_batch_to_batch() -> None:
    metrics = measured(None, seconds=0.1, period_s=4.0)
    assert (metrics.seconds, metrics.tokens_per_s) == (0.1, 0.5)


def test_a_delivery_is_measured_against_the_one_before() -> None:
    meter = DeliveryMeter()
    assert meter.delivered(began=10, now=12, failed_attempts=3, aborted_requests=1, measured={}) == Interval(2, 2, 3, 1)
    meter.generates_ahead(13)
    assert meter.delivered(began=16, now=17, failed_attempts=3, aborted_requests=5, measured={}) == Interval(1, 4, 0, 4)
    assert meter.delivered(began=18, now=19, failed_attempts=4, aborted_requests=5, measured={}) == Interval(1, 2, 1, 0)


def test_parts_of_the_reward_have_a_mean_each_over_the_samples_that_have_them() -> None:
    metrics = measured(parts=[{"format": 1.0, "length": 4.0}, {"format": 0.0}, {}]).as_dict()
    assert (metrics["rollout/reward/format_mean"], metrics["rollout/reward/length_mean"]) == (0.5, 4.0)
    assert not any(name.startswith("rollout/reward/") for name in measured(None).as_dict())


def test_only_numbers_are_written_to_the_metrics() -> None:
    assert all(isinstance(value, int | float) for value in measured(None, "ValueError: a").as_dict().values())


@pytest.mark.parametrize(
    ("failures", "common"), [([], ""), (["x"], "x"), (["KeyError: a", "b: 1", "b: 2", "KeyError: c"], "KeyError: a")]
)
def test_the_first_failure_of_the_commonest_kind_stands_for_it(failures: list[str], common: str) -> None:
    assert most_common_failure(failures) == common


def test_rewards_and_lengths_are_told_with_their_spread() -> None:
    samples = [
        Sample.of_turn(
            f"0.{i}",
            "0",
            Turn(IDS, np.full(i + 1, 5, np.int32), np.full(i + 1, -0.5, np.float32), (VersionSpan("0.1", 0, i + 1),)),
            finish_reason="stop",
            text="",
            reward=float(i),
        )
        for i in range(11)
    ]
    group = SampleGroup("0", Prompt("p:0", "1+1=", IDS), tuple(samples))
    taken = Taken((Group(Issue(0, group.prompt, epoch=0), 0),), (group,), Collection(1, 8, 8), ready=0)
    interval = Interval(1.0, 1.0, 0, 0, {"reward_s_mean": 0.5})
    told = measure_rollout(1, taken, interval, concurrency=8, published_version="0.1", bound=ONCE).as_dict()
    rewards = [told[f"rollout/reward_{name}"] for name in ("min", "p10", "p50", "p90", "max")]
    assert rewards == [0, 1, 5, 9, 10]
    assert [told[f"rollout/response_tokens_{name}"] for name in ("p10", "p50", "p90", "max")] == [2, 6, 10, 11]
    assert told["rollout/reward_s_mean"] == 0.5 and "rollout/reward_s_max" not in told, (
        "what was not measured is absent"
    )
    assert "rollout/engine_queue_max" not in told
