"""Deliveries: the batches on their way through the trainers.

Invariants
- Each trainer gets each rollout id once, and commits it once after that.
- All trainers get the same groups. A batch is trained when the last trainer has committed it.
- Batches that every trainer is done with are forgotten, so memory does not grow with the run.

Pure: no I/O and no clock. The caller moves the groups in the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.errors import RolloutError
from asyncrl.rollout.scheduling.group import Group

TRAINER = "trainer"
"""The name of the only trainer, where the executor was given no names."""


@dataclass(slots=True)
class _Delivery:
    """A batch that some trainer has not committed."""

    groups: tuple[Group, ...]
    to_get: set[str]
    """Trainers that have not asked for it."""
    to_commit: set[str]
    """Trainers that have not committed it, whether they got it or not."""

    def is_with(self, trainer: str) -> bool:
        """Whether `trainer` got it and has not committed it."""
        return trainer in self.to_commit and trainer not in self.to_get


class Deliveries:
    """Open batches by rollout id; see the module's docstring."""

    def __init__(self, trainers: Sequence[str] = (TRAINER,)) -> None:
        """Every one of `trainers` trains on every batch."""
        self._trainers = frozenset(trainers)
        self._open: dict[int, _Delivery] = {}
        self._delivered = range(0)
        """Rollout ids that were delivered: steps follow one another."""

    def check_deliverable(self, rollout_id: int, trainer: str = TRAINER) -> None:
        """Raises RolloutError when `trainer` got `rollout_id` before, or is unknown."""
        self._check_known(trainer)
        delivery = self._open.get(rollout_id)
        if rollout_id in self._delivered and (delivery is None or trainer not in delivery.to_get):
            state = "delivered" if delivery is not None and delivery.is_with(trainer) else "committed"
            raise RolloutError(f"rollout {rollout_id} was already {state}; get each rollout id once")

    def deliver(self, rollout_id: int, groups: Sequence[Group], trainer: str = TRAINER) -> None:
        """The first trainer gets a batch. Raises as `check_deliverable` does."""
        self.check_deliverable(rollout_id, trainer)
        first = self._delivered.start if self._delivered else rollout_id
        self._delivered = range(first, rollout_id + 1)
        self._open[rollout_id] = _Delivery(tuple(groups), set(self._trainers - {trainer}), set(self._trainers))

    def share(self, rollout_id: int, trainer: str) -> bool:
        """Another trainer gets a batch; returns whether others still have to. Raises as `check_deliverable` does."""
        self.check_deliverable(rollout_id, trainer)
        delivery = self._open[rollout_id]
        delivery.to_get.remove(trainer)
        return bool(delivery.to_get)

    def commit(self, rollout_id: int, trainer: str = TRAINER) -> tuple[Group, ...] | None:
        """`trainer` has trained a batch; returns its groups when it was the last trainer, else None.

        Raises RolloutError when `rollout_id` was not delivered to `trainer`, or was committed by it before.
        """
        self._check_known(trainer)
        delivery = self._open.get(rollout_id)
        if delivery is None or not delivery.is_with(trainer):
            committed = rollout_id in self._delivered and (delivery is None or trainer not in delivery.to_commit)
            reason = "was already committed" if committed else "was never delivered"
            raise RolloutError(f"rollout {rollout_id} {reason}; commit each rollout id once, after get")
        delivery.to_commit.remove(trainer)
        if delivery.to_commit:
            return None
        return self._open.pop(rollout_id).groups

    def settle(self, step: int, trainer: str = TRAINER) -> tuple[Group, ...] | None:
        """The job ends, and `trainer` has trained the batches of the steps before `step`: none stays open for it.

        Commits the batch of the step before, where `trainer` has not done that; returns what `commit` returns. Forgets
        the batches from `step` on that no other trainer got: their groups stay delivered in the ledger, and untrained.
        """
        self._check_known(trainer)
        last = self._open.get(step - 1)
        trained = self.commit(step - 1, trainer) if last is not None and last.is_with(trainer) else None
        for rollout_id, delivery in tuple(self._open.items()):
            if rollout_id >= step and trainer in delivery.to_commit and delivery.to_get >= self._trainers - {trainer}:
                del self._open[rollout_id]
        return trained

    def check_all_committed(self) -> None:
        """Raises RolloutError while a batch is with a trainer: it may be trained or not."""
        if self._open:
            raise RolloutError(
                f"rollout {min(self._open)} was delivered and not committed; save after a commit and before a get"
            )

    def forget(self) -> None:
        """The job ends, and no open batch will be committed."""
        self._open.clear()

    def _check_known(self, trainer: str) -> None:
        if trainer not in self._trainers:
            known = ", ".join(sorted(self._trainers))
            raise RolloutError(f"no trainer {trainer!r} was named to the executor, but {known}")
