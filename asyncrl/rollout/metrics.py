"""The figures of one rollout batch, for metrics.jsonl and the display. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.data.sample import Sample
from asyncrl.data.staleness import Bound, step_of
from asyncrl.rollout.scheduling.production import Taken


@dataclass(frozen=True, slots=True)
class RolloutMetrics:
    """One batch as it was delivered. None stands for what nobody has measured yet."""

    rollout_id: int
    """Number of the batch in the job, from 0."""
    epoch: int
    """Pass over the data, from 0, of the first prompt of the batch."""
    groups: int
    """Prompt groups in the batch."""
    samples: int
    """Samples with a reward, which the trainer trains on."""
    failed_samples: int
    """Samples of the delivered groups that could not be generated or scored, or for which the reward abstained."""
    dropped_groups: int
    """Groups replaced on the way to this batch."""
    filtered_groups: int
    """Groups that filters took out on the way to this batch."""
    surplus_groups: int
    """Groups of over-sampling that no batch had room for."""
    reissued_groups: int
    """Groups that were not finished in time, or too old; their prompts were issued again."""
    ready_groups: int
    """Finished groups that wait for later batches."""
    failed_attempts: int
    """Requests sent again, or given up, on the way to this batch."""
    aborted_requests: int
    """Requests that were ended in their engines on the way to this batch, as no sample needed them any more."""
    concurrency: int
    """Most requests in flight as of the delivery: what rollout.concurrency says, or less where it adapts."""
    reward_mean: float
    """Mean reward of the samples."""
    reward_std: float
    """Standard deviation of the rewards of all samples, over groups and within them."""
    reward_min: float
    """Lowest reward."""
    reward_p10: float
    """10th percentile of the rewards: a tenth of the samples have less."""
    reward_p50: float
    """Median reward."""
    reward_p90: float
    """90th percentile of the rewards."""
    reward_max: float
    """Highest reward."""
    zero_variance_groups: int
    """Groups whose rewards are all equal: they teach GRPO nothing."""
    prompt_tokens_mean: float
    """Mean length of the prompts in tokens, one prompt for each sample."""
    response_tokens_mean: float
    """Mean number of tokens that the policy sampled for a sample."""
    response_tokens_p10: float
    """10th percentile of the lengths: a tenth of the samples are shorter."""
    response_tokens_p50: float
    """Median length."""
    response_tokens_p90: float
    """90th percentile of the lengths."""
    response_tokens_max: int
    """Longest response."""
    truncated_fraction: float
    """Fraction of the samples that ended by max_new_tokens."""
    logprob_mean: float
    """Mean log-prob of the sampled tokens: minus a sampled estimate of the entropy, nat per token."""
    off_version_fraction: float
    """Fraction of the tokens that were made by weights other than the published ones."""
    staleness_mean: float
    """Optimizer steps between the weights that made a token and those that it trains, mean over the tokens."""
    staleness_max: int
    """Staleness of the stalest token at the last optimizer step of the batch; never above rollout.max_staleness."""
    response_tokens: int
    """Tokens that the policy sampled, over all samples."""
    seconds: float
    """From the call of get to the delivery: how long the trainer waited."""
    tokens_per_s: float
    """Response tokens delivered per second: since get was called, or, where groups are generated ahead, since the
    delivery before."""
    reward_s_mean: float | None = None
    """Mean seconds from a response to its reward, the wait for a free reward worker included."""
    reward_s_max: float | None = None
    """Longest of them since the delivery before."""
    engine_running_mean: float | None = None
    """Requests that an engine decodes at once: mean over engines and looks (every 2 s) since the delivery before."""
    engine_queue_mean: float | None = None
    """Requests that wait in the queue of an engine: mean over engines and looks."""
    engine_queue_max: int | None = None
    """Longest queue of an engine at a look. A queue that stays long says that rollout.concurrency is too high."""
    engine_kv_use_max: float | None = None
    """Largest fraction of its KV memory that an engine had in use at a look; near 1 it takes requests back."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Mean of each named number that the reward returned, over the samples that have it."""
    failure: str = ""
    """The most common sample failure; else why the first dropped group failed; empty if none."""

    def as_dict(self, prefix: str = "rollout/") -> dict[str, float]:
        """Numbers by name, without the rollout id and without what was not measured."""
        left_out = ("rollout_id", "failure", "reward_parts")
        named = {prefix + k: v for k, v in asdict(self).items() if k not in left_out and v is not None}
        return named | {f"{prefix}reward/{name}_mean": mean for name, mean in self.reward_parts.items()}


def failure_kind(failure: str) -> str:
    """The recurring part of a failure: `ValueError` of `ValueError: no number in "x" (rewards.py:7 in score)`."""
    return failure.partition(":")[0][:80]


def most_common_failure(failures: Sequence[str]) -> str:
    """The first failure of the most frequent kind; empty for none."""
    if not failures:
        return ""
    kind, _ = Counter(map(failure_kind, failures)).most_common(1)[0]
    return next(failure for failure in failures if failure_kind(failure) == kind)


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened between the delivery before and this one."""

    seconds: float
    """Since get was called."""
    period_s: float
    """The time in which the tokens were generated; `tokens_per_s` goes by it."""
    failed_attempts: int
    aborted_requests: int
    measured: Mapping[str, float] = field(default_factory=dict)
    """Further fields of `RolloutMetrics`: of rewards and engines."""


class DeliveryMeter:
    """Turns the time and running totals of requests into the figures between two deliveries."""

    def __init__(self) -> None:
        """Nothing was delivered."""
        self._ahead = False
        self._delivered_at = 0.0
        self._failed_attempts = 0
        self._aborted_requests = 0

    def generates_ahead(self, now: float) -> None:
        """From monotonic time `now` on, groups are generated also while no `get` waits."""
        self._ahead, self._delivered_at = True, now

    def delivered(
        self, *, began: float, now: float, failed_attempts: int, aborted_requests: int, measured: Mapping[str, float]
    ) -> Interval:
        """A batch is delivered at monotonic time `now`, for a `get` that began at `began`; the counts are totals."""
        interval = Interval(
            now - began,
            now - (self._delivered_at if self._ahead else began),
            failed_attempts - self._failed_attempts,
            aborted_requests - self._aborted_requests,
            measured,
        )
        self._delivered_at, self._failed_attempts, self._aborted_requests = now, failed_attempts, aborted_requests
        return interval


def measure_rollout(
    rollout_id: int,
    taken: Taken,
    interval: Interval,
    *,
    concurrency: int,
    published_version: str | None,
    bound: Bound,
) -> RolloutMetrics:
    """Figures over the usable samples of a batch (at least one).

    Without `published_version` no token counts as made by other weights, or as stale.
    """
    groups, collection = taken.samples, taken.collection
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
    reward_p10, reward_p50, reward_p90 = _percentiles(rewards)
    tokens_p10, tokens_p50, tokens_p90 = _percentiles(lengths)
    mean, most = (0.0, 0) if published_version is None else _staleness(rollout_id, usable, bound)
    return RolloutMetrics(
        rollout_id=rollout_id,
        epoch=taken.groups[0].issue.epoch,
        groups=len(groups),
        samples=len(usable),
        failed_samples=sum(len(group.samples) for group in groups) - len(usable),
        dropped_groups=collection.dropped,
        filtered_groups=collection.filtered,
        surplus_groups=collection.surplus,
        reissued_groups=collection.reissued,
        ready_groups=taken.ready,
        failed_attempts=interval.failed_attempts,
        aborted_requests=interval.aborted_requests,
        concurrency=concurrency,
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        reward_min=float(rewards.min()),
        reward_p10=reward_p10,
        reward_p50=reward_p50,
        reward_p90=reward_p90,
        reward_max=float(rewards.max()),
        zero_variance_groups=sum(len(values) == 1 for values in by_group),
        prompt_tokens_mean=float(np.mean([len(sample.prompt_ids) for sample in usable])),
        response_tokens_mean=float(lengths.mean()),
        response_tokens_p10=tokens_p10,
        response_tokens_p50=tokens_p50,
        response_tokens_p90=tokens_p90,
        response_tokens_max=int(lengths.max()),
        truncated_fraction=float(np.mean([sample.finish_reason == "length" for sample in usable])),
        logprob_mean=float(np.concatenate([sample.logprobs for sample in usable]).mean(dtype=np.float64)),
        off_version_fraction=off_version / tokens,
        staleness_mean=mean,
        staleness_max=most,
        response_tokens=tokens,
        seconds=interval.seconds,
        tokens_per_s=tokens / interval.period_s if interval.period_s > 0 else 0.0,
        reward_parts=_part_means(usable),
        failure=most_common_failure(
            [sample.failure for group in groups for sample in group.samples if sample.failure is not None]
        )
        or collection.failure,
        **dict[str, Any](interval.measured),
    )


def _percentiles(values: NDArray[Any]) -> tuple[float, float, float]:
    """The 10th, 50th and 90th percentile."""
    low, middle, high = np.percentile(values, (10, 50, 90))
    return float(low), float(middle), float(high)


def _part_means(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean of each part of the rewards over the samples that have it."""
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.reward_parts.items():
            parts.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in parts.items()}


def _staleness(rollout_id: int, samples: Sequence[Sample], bound: Bound) -> tuple[float, int]:
    """Mean and maximum staleness over the tokens of `samples` whose weights have a step.

    The mean is also one over the optimizer steps of the batch, each of which trains a part of the samples.
    """
    total = tokens = most = 0
    for sample in samples:
        for span in sample.versions:
            if (step := step_of(span.version)) is not None:
                stalest = bound.staleness(rollout_id, step)
                most = max(most, stalest)
                total += (span.end - span.start) * stalest
                tokens += span.end - span.start
    return (total / tokens - (bound.optimizer_steps - 1) / 2 if tokens else 0.0), most
