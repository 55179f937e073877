"""Staleness: optimizer steps between the weights that made a token and those that it trains. Pure.

Batch j is trained by m optimizer steps, in one pass over it or several, the first of them on weights of step j. A token
made by weights of step v (version `attempt.v`, v batches trained) has a staleness of m·(j - v) at the first of these
steps and m - 1 more at the last. `Bound.check` holds the invariant of the whole project: nothing is trained that is
staler than `max_staleness`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.config.checks.staleness import max_staleness
from asyncrl.data.sample import VersionSpan
from asyncrl.errors import StalenessError

if TYPE_CHECKING:
    from asyncrl.data.batch import RolloutBatch


def step_of(version: str) -> int | None:
    """Batches trained into the weights `attempt.step`; None for a stamp that is not of this form."""
    attempt, _, step = version.partition(".")
    return int(step) if attempt.isdecimal() and step.isdecimal() else None


def oldest_step(versions: Iterable[VersionSpan]) -> int | None:
    """Step of the oldest weights among spans; None where one of them tells no step."""
    oldest: int | None = None
    for span in versions:
        step = step_of(span.version)
        if step is None:
            return None
        oldest = step if oldest is None else min(oldest, step)
    return oldest


@dataclass(frozen=True, slots=True)
class Bound:
    """How stale a token may be."""

    max_staleness: int
    """Optimizer steps."""
    optimizer_steps: int
    """m: taken on each batch, all passes together."""

    @classmethod
    def of(cls, config: Config) -> Bound:
        return cls(max_staleness(config), config.train.optimizer_steps_per_batch)

    @property
    def batches(self) -> int:
        """The bound in batches: weights of step v may make tokens of batch v + batches, and of none later."""
        return (self.max_staleness + 1) // self.optimizer_steps - 1

    def staleness(self, rollout_id: int, step: int) -> int:
        """Of a token made by weights of `step`, at the last optimizer step of batch `rollout_id`."""
        return self.optimizer_steps * (rollout_id - step + 1) - 1

    def check(self, batch: RolloutBatch) -> None:
        """Raises StalenessError when a token is too stale to be trained, or made by weights that are not behind it."""
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
            return "that is no version of this job (attempt.step)"
        if step > rollout_id:
            return "weights of that step came after it, in an attempt that was rolled back"
        return (
            f"their staleness is {self.optimizer_steps} * ({rollout_id} - {step} + 1) - 1 = "
            f"{self.staleness(rollout_id, step)} optimizer steps, and rollout.max_staleness is {self.max_staleness}"
        )
