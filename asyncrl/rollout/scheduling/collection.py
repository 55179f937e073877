"""Collection: counts the groups that are lost between two batches, and says when to give up. Pure.

A group with too few usable samples is dropped, and a new prompt takes its place; a group that a filter takes out
likewise. Each may happen only so often for one batch. Beyond that the run ends and says what it saw, instead of drawing
prompts for ever.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from asyncrl.data.sample import Sample, SampleGroup
from asyncrl.errors import RewardError, RolloutError, counted
from asyncrl.rollout.rewards.result import is_fault

_MIN_DROPS = 8  # groups that one batch may lose even when it is small
_MAX_FILTERED = 32  # batches' worth of groups that filters may take out while one is gathered


def drop_reason(group: SampleGroup, min_usable: int) -> str | None:
    """Why `group` cannot be trained, in words that recur, or None. GRPO needs two rewards to compare."""
    usable = sum(sample.reward is not None for sample in group.samples)
    if usable >= min_usable:
        return None
    return f"only {usable} of {len(group.samples)} samples usable ({first_failure(group).partition(':')[0]})"


def first_failure(group: SampleGroup) -> str:
    """The reason of the first failed sample; empty when none failed."""
    return next((sample.failure for sample in group.samples if sample.failure is not None), "")


@dataclass(slots=True)
class Collection:
    """The groups that ended between two batches without being in one."""

    wanted: int
    """Groups of the batch."""
    max_drops: int
    max_filtered: int
    dropped: int = 0
    """Groups with too few usable samples, or made by weights that are too old."""
    filtered: int = 0
    surplus: int = 0
    """Groups that no batch had room for."""
    reissued: int = 0
    """Groups that were not finished at their deadline, or too old; their prompts were issued again."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Drops by reason."""
    failure: str = ""
    """The first failure."""

    @classmethod
    def of_batch(cls, groups: int) -> Collection:
        """An empty collection for a batch of so many groups, with the usual limits."""
        return cls(groups, max_drops=max(_MIN_DROPS, 2 * groups), max_filtered=_MAX_FILTERED * groups)

    def drop(self, reason: str, failure: str) -> RolloutError | None:
        """Counts a drop; returns an error when there were more than a healthy run ever sees."""
        self.dropped += 1
        self.reasons[reason] += 1
        self.failure = self.failure or failure
        if self.dropped <= self.max_drops:
            return None
        common, count = self.reasons.most_common(1)[0]
        return RolloutError(
            f"{counted(self.dropped, 'prompt group')} failed while a batch of {self.wanted} was gathered; "
            f"most often ({counted(count, 'time')}): {common}; the first failure: {self.failure}; "
            "see logs/ and events.jsonl in the run directory"
        )

    def filter(self, reason: str) -> RolloutError | None:
        """Counts a group that a filter took out; returns an error when filters leave too few."""
        self.filtered += 1
        if self.filtered <= self.max_filtered:
            return None
        return RolloutError(
            f"rollout.filters took out {counted(self.filtered, 'prompt group')} while a batch of {self.wanted} was "
            f"gathered; the last reason: {reason}. The task is too easy or too hard for this policy, or a filter too "
            "strict"
        )


@dataclass(slots=True)
class FirstBatchCheck:
    """Ends the run when the reward fails on more than `max_failure_fraction` of the first batch's worth of samples."""

    reward: str
    """Name of the reward function."""
    expected: int
    """Samples of the first batch."""
    max_failure_fraction: float
    seen: int = 0
    failed: int = 0
    first_failure: str = ""
    closed: bool = False
    """The first batch is done; a later failure is an event and ends nothing."""

    def observe(self, sample: Sample) -> RewardError | None:
        """Takes a sample that was generated; returns an error as soon as the fraction is certain to be exceeded."""
        self.seen += 1
        self.closed = self.closed or self.seen > self.expected
        if self.closed or sample.failure is None or not is_fault(sample.failure):
            return None
        self.failed += 1
        self.first_failure = self.first_failure or sample.failure
        if self.failed <= self.max_failure_fraction * self.expected:
            return None
        return RewardError(
            f"reward.function: {self.reward} failed on {self.failed} of the first {self.expected} samples; "
            f"the first failure: {self.first_failure}"
        )
