from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.data.sample import Prompt, Sample, SampleGroup, VersionSpan
from asyncrl.rollout.metrics import RolloutMetrics, measure_rollout, most_common_failure

IDS = np.array([5, 6], np.int32)
SAMPLE = Sample(
    sample_id="0.0",
    group_id="0",
    prompt_ids=IDS,
    output_ids=IDS,
    logprobs=np.array([-0.5, -0.5], np.float32),
    finish_reason="stop",
    versions=(VersionSpan("0.1", 0, 2),),
    text="yes",
    reward=1.0,
)


def measured(*failures: str | None, dropped: str = "") -> RolloutMetrics:
    samples = [SAMPLE if f is None else replace(SAMPLE, reward=None, failure=f) for f in failures]
    group = SampleGroup("0", Prompt("p:0", "1+1=", IDS), tuple(samples))
    return measure_rollout(
        0,
        [group],
        epoch=0,
        dropped_groups=bool(dropped),
        dropped_failure=dropped,
        failed_attempts=0,
        seconds=2.0,
        published_version="0.1",
    )


def test_a_batch_names_what_most_of_its_failed_samples_failed_of() -> None:
    metrics = measured(None, "generation timeout: late", "ValueError: a (r.py:1)", "ValueError: b (r.py:1)")
    assert (metrics.samples, metrics.failed_samples, metrics.failure) == (1, 3, "ValueError: a (r.py:1)")
    assert measured(None).failure == ""
    assert measured(None, dropped="x: 1").failure == "x: 1"


def test_only_numbers_are_written_to_the_metrics() -> None:
    assert all(isinstance(value, int | float) for value in measured(None, "ValueError: a").as_dict().values())


@pytest.mark.parametrize(
    ("failures", "common"), [([], ""), (["x"], "x"), (["KeyError: a", "b: 1", "b: 2", "KeyError: c"], "KeyError: a")]
)
def test_the_first_failure_of_the_commonest_kind_stands_for_it(failures: list[str], common: str) -> None:
    assert most_common_failure(failures) == common
