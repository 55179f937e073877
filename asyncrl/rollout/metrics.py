"""The figures of one rollout batch, for metrics.jsonl and the display. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from asyncrl.data.sample import SampleGroup


@dataclass(frozen=True, slots=True)
class RolloutMetrics:
    """One batch as it was delivered."""

    rollout_id: int
    epoch: int
    groups: int
    samples: int
    """Usable samples, those that are trained on."""
    failed_samples: int
    """Samples of the delivered groups that could not be generated or scored."""
    dropped_groups: int
    """Groups replaced on the way to this batch."""
    failed_attempts: int
    """Requests sent again, or given up, on the way to this batch."""
    reward_mean: float
    reward_std: float
    zero_variance_groups: int
    """Groups whose rewards are all equal: they teach GRPO nothing."""
    prompt_tokens_mean: float
    response_tokens_mean: float
    response_tokens_max: int
    truncated_fraction: float
    """Samples that ended by max_new_tokens."""
    logprob_mean: float
    """Mean log-prob of the sampled tokens: minus a sampled estimate of the entropy, nat per token."""
    off_version_fraction: float
    """Tokens made by weights other than the published ones."""
    response_tokens: int
    seconds: float
    """From the call of get to the delivery."""
    tokens_per_s: float
    """Response tokens delivered per second of that."""
    failure: str = ""
    """An example of what most of the failed samples failed of, else what the first replaced group failed of; empty
    where nothing failed."""

    def as_dict(self, prefix: str = "rollout/") -> dict[str, float]:
        """Numbers by name, without the rollout id."""
        return {prefix + name: value for name, value in asdict(self).items() if name not in ("rollout_id", "failure")}


def failure_kind(failure: str) -> str:
    """The words of a failure that recur: `ValueError` of `ValueError: no number in "x" (rewards.py:7 in score)`."""
    return failure.partition(":")[0][:80]


def most_common_failure(failures: Sequence[str]) -> str:
    """The first of the kind that is most frequent; empty for none."""
    if not failures:
        return ""
    kind, _ = Counter(map(failure_kind, failures)).most_common(1)[0]
    return next(failure for failure in failures if failure_kind(failure) == kind)


def measure_rollout(
    rollout_id: int,
    groups: Sequence[SampleGroup],
    *,
    epoch: int,
    dropped_groups: int,
    dropped_failure: str,
    failed_attempts: int,
    seconds: float,
    published_version: str | None,
) -> RolloutMetrics:
    """Figures over the usable samples (at least one) of `groups`; without `published_version` none counts as off."""
    usable = [sample for group in groups for sample in group.samples if sample.reward is not None]
    rewards = np.array([sample.reward for sample in usable], np.float64)
    lengths = np.array([len(sample.output_ids) for sample in usable], np.int64)
    by_group = [{sample.reward for sample in group.samples if sample.reward is not None} for group in groups]
    off_version = sum(
        span.end - span.start
        for sample in usable
        for span in sample.versions
        if published_version is not None and span.version != published_version
    )
    tokens = int(lengths.sum())
    return RolloutMetrics(
        rollout_id=rollout_id,
        epoch=epoch,
        groups=len(groups),
        samples=len(usable),
        failed_samples=sum(len(group.samples) for group in groups) - len(usable),
        dropped_groups=dropped_groups,
        failed_attempts=failed_attempts,
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        zero_variance_groups=sum(len(values) == 1 for values in by_group),
        prompt_tokens_mean=float(np.mean([len(sample.prompt_ids) for sample in usable])),
        response_tokens_mean=float(lengths.mean()),
        response_tokens_max=int(lengths.max()),
        truncated_fraction=float(np.mean([sample.finish_reason == "length" for sample in usable])),
        logprob_mean=float(np.concatenate([sample.logprobs for sample in usable]).mean(dtype=np.float64)),
        off_version_fraction=off_version / tokens,
        response_tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
        failure=most_common_failure(
            [sample.failure for group in groups for sample in group.samples if sample.failure is not None]
        )
        or dropped_failure,
    )
