"""Compares a replayed training step with the recorded one. Pure: no I/O.

There are two comparisons. Metrics (losses, gradient norms, ...) are compared with those of the recorded run: on the
same layout, in float32, from the same weights, they are the same to the last bit. The trainer's log-prob of each
trained token that was made by the weights before the step is compared with the engine's: where they differ, weights,
tokenisation or masks do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.chosen import token_staleness
from asyncrl.data.batch import RolloutBatch
from asyncrl.errors import counted

_TRAINING = "train/"


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric, as recorded and as replayed."""

    name: str
    recorded: float
    replayed: float

    @property
    def relative(self) -> float:
        """The relative difference: 0 where both are the same, infinite where only one of them is a number."""
        if self.recorded == self.replayed or (math.isnan(self.recorded) and math.isnan(self.replayed)):
            return 0.0
        if not (math.isfinite(self.recorded) and math.isfinite(self.replayed)):
            return math.inf
        return abs(self.recorded - self.replayed) / max(abs(self.recorded), abs(self.replayed))


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """The difference of the trainer's and the engine's log-probs, over trained tokens, in nat."""

    mean: float
    """Mean magnitude."""
    largest: float
    """Largest magnitude."""
    sample_id: str
    """The sample with the largest difference."""
    token: int
    """The place of the largest difference among the sampled tokens of that sample."""


@dataclass(frozen=True, slots=True)
class StepComparison:
    """One replayed step."""

    step: int
    metrics: tuple[Difference, ...]
    """Empty where nothing was recorded."""
    logprobs: LogprobDifference | None
    """None where no trained token was made by the weights before the step."""
    tolerance: float

    @property
    def differing(self) -> tuple[Difference, ...]:
        """Metrics that differ by more than the tolerance, the worst first."""
        beyond = [difference for difference in self.metrics if difference.relative > self.tolerance]
        return tuple(sorted(beyond, key=lambda difference: -difference.relative))

    def as_record(self) -> dict[str, Any]:
        """The comparison as a record for a line of JSON."""
        return {
            "step": self.step,
            "same": not self.differing if self.metrics else None,
            "metrics": {d.name: {"recorded": d.recorded, "replayed": d.replayed} for d in self.metrics},
            "logprobs": None if self.logprobs is None else asdict(self.logprobs),
        }

    def in_words(self) -> str:
        """The comparison in one line of text."""
        parts = [f"{d.name} was {d.recorded:.7g}, is {d.replayed:.7g} ({d.relative:.1e})" for d in self.differing[:3]]
        if len(self.differing) > len(parts):
            parts.append(f"{len(self.differing) - len(parts)} more")
        if not parts:
            parts.append("as recorded" if self.metrics else "nothing was recorded of it")
        if (found := self.logprobs) is not None:
            place = f"{found.sample_id}, token {found.token}"
            parts.append(
                f"trainer and engine differ by {found.mean:.1e} nat a token, most at {place}: {found.largest:.1e}"
            )
        return f"step {self.step}: {'; '.join(parts)}"


def compare_metrics(recorded: Mapping[str, Any], replayed: Mapping[str, float]) -> tuple[Difference, ...]:
    """Compares the `train/` metrics that both have. A metric that is null in `recorded` was not finite."""
    return tuple(
        Difference(name, math.nan if recorded[name] is None else float(recorded[name]), value)
        for name, value in sorted(replayed.items())
        if name.startswith(_TRAINING) and name in recorded
    )


def compare_logprobs(batch: RolloutBatch, logprobs: Tensor) -> LogprobDifference | None:
    """Compares log-probs of trained tokens that the weights before the step made; None where there are none.

    `logprobs`: float32 [T], of the trainer before the step, at the batch's temperature.
    """
    compared = batch.loss_mask & (token_staleness(batch) == 0)
    difference = (logprobs - batch.logprobs)[compared].abs()
    if not len(difference):
        return None
    worst = int(torch.where(difference.isnan(), math.inf, difference).argmax())
    place = int(compared.nonzero()[worst])
    sample = int(batch.token_samples[place])
    before = batch.sampled[:place] & (batch.token_samples[:place] == sample)
    mean = float(difference.sum()) / len(difference)
    return LogprobDifference(mean, float(difference[worst]), batch.sample_ids[sample], int(before.sum()))


def verdict(steps: Sequence[StepComparison]) -> str:
    """The whole replay in one line of text."""
    compared = [step for step in steps if step.metrics]
    if not compared:
        return f"{counted(len(steps), 'step')} replayed; nothing was recorded that they could be compared with"
    differing = [step for step in compared if step.differing]
    worst = max(
        ((d.relative, d.name, step.step) for step in compared for d in step.metrics), key=lambda found: found[0]
    )
    largest = f"largest relative difference {worst[0]:.1e}" + (f", {worst[1]} of step {worst[2]}" if worst[0] else "")
    if not differing:
        return (
            f"{counted(len(compared), 'step')} replayed, all as recorded within {compared[0].tolerance:g} ({largest})"
        )
    return (
        f"{len(differing)} of {len(compared)} replayed steps differ, the first is step {differing[0].step} ({largest})"
    )
