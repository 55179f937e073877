"""Staleness: the number of optimizer steps between the weights that made a token and the weights that it trains. Pure.

The trainer takes m optimizer steps on batch j, in one pass over it or several; the first step starts from weights of
step j. A token made by weights of step v (version `attempt.v`, v batches trained) has a staleness of m·(j - v) at the
first of these steps and m - 1 more at the last. `Bound.check` enforces the invariant of the whole project: no token
that is staler than `max_staleness` is trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.config.checks.staleness import max_staleness
from asyncrl.data.sample import VersionSpan
from asyncrl.errors import StalenessError

if TYPE_CHECKING:  # torch stays out of the driver until the engines are on their way
    from asyncrl.data.batch import RolloutBatch


def step_of(version: str) -> int | None:
    """Returns the step of version `attempt.step`: batches trained into these weights. None for any other text."""
    attempt, _, step = version.partition(".")
    return int(step) if attempt.isdecimal() and step.isdecimal() else None


def oldest_step(versions: Iterable[VersionSpan]) -> int | None:
    """Returns the step of the oldest weights among spans; None if the version of one of them names no step."""
    oldest: int | None = None
    for span in versions:
        step = step_of(span.version)
        if step is None:
            return None
        oldest = step if oldest is None else min(oldest, step)
    return oldest


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest staleness that a token may have."""

    max_staleness: int
    """In optimizer steps."""
    optimizer_steps: int
    """m: optimizer steps on each batch, over all passes."""

    @classmethod
    def of(cls, config: Config) -> Bound:
        """Returns the bound of a job."""
        return cls(max_staleness(config), config.train.optimizer_steps_per_batch)

    @property
    def batches(self) -> int:
        """The bound in batches: weights of step v may make tokens for batch v + `batches`, and for no later batch."""
        return (self.max_staleness + 1) // self.optimizer_steps - 1

    def staleness(self, rollout_id: int, step: int) -> int:
        """Returns the staleness of a token made by weights of `step`, at the last optimizer step of `rollout_id`."""
        return self.optimizer_steps * (rollout_id - step + 1) - 1

    def check(self, batch: RolloutBatch) -> None:
        """Raises StalenessError if a token is too stale, or weights of a later step or another job made it."""
        for sample, spans in zip(batch.sample_index.tolist(), batch.versions, strict=True):
            for span in spans:
                step = step_of(span.version)
                if step is None or not 0 <= batch.rollout_id - step <= self.batches:
                    group_id = batch.group_ids[int(batch.group_index[sample])]
                    raise StalenessError(
                        f"group {group_id}, sample {batch.sample_ids[sample]}: tokens {span.start}-{span.end} were "
                        f"made by weights {span.version!r} and must not train batch {batch.rollout_id}: "
                        + self._why(batch.rollout_id, step)
                    )

    def _why(self, rollout_id: int, step: int | None) -> str:
        if step is None:
            return "that is not a version of this job (attempt.step)"
        if step > rollout_id:
            return "weights of that step are newer than the batch; they come from an attempt that was rolled back"
        return (
            f"their staleness is {self.optimizer_steps} * ({rollout_id} - {step} + 1) - 1 = "
            f"{self.staleness(rollout_id, step)} optimizer steps, and rollout.max_staleness is {self.max_staleness}"
        )


def overlaps(config: Config) -> bool:
    """Whether engines generate while the trainer trains, in a loop that generates ahead: where the bound allows it."""
    return Bound.of(config).batches > 0
