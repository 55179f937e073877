"""The ledger: where every prompt group stands, from admission to its one end.

    admitted → running → finished → delivered(rollout) → trained
        └─────────┴──────────┴───────────┴─→ filtered(reason) | dropped(reason)

Invariants
- A group is admitted once per attempt of the job and ends once: trained, filtered or dropped.
- Each trainer gets a rollout id once, and commits it once after that. All trainers get the same groups, which are
  trained when the last of them has committed.
- A group that an earlier attempt finished, and no batch took, begins as finished; counts go on where they were.
- Over all attempts a group ends once that was not rolled back. Its id says so: it is the same in each of them.

A pure state machine: no I/O, no clock. Each transition returns the event that records it; the caller emits it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from asyncrl.errors import RolloutError
from asyncrl.rollout.group_events import (
    GroupAdmitted,
    GroupDropped,
    GroupFiltered,
    GroupFinished,
    GroupRunning,
    GroupsDelivered,
    GroupsRestored,
    GroupsRolledBack,
    GroupsTrained,
)


class GroupState(StrEnum):
    """Where a group stands."""

    ADMITTED = "admitted"
    RUNNING = "running"
    FINISHED = "finished"
    DELIVERED = "delivered"
    TRAINED = "trained"
    FILTERED = "filtered"
    DROPPED = "dropped"


def group_id_of(ordinal: int, issues: int) -> str:
    """Of the draw with that number from the prompts, which was issued so often before.

    No id is a prefix of another with what follows it in a request id, since engines abort by prefix.
    """
    return f"{ordinal:08d}" + (f"r{issues}" if issues else "")


@dataclass(frozen=True, slots=True)
class Reached:
    """How far the groups of a job were when it was saved."""

    drawn: int
    """Prompts drawn: the ordinal of the next one."""
    live: Mapping[int, int]
    """Groups that had not ended: ordinal → how often it was issued before."""

    def had_ended(self, group_id: str) -> bool:
        ordinal, _, issues = group_id.partition("r")
        number = int(ordinal)
        return number < self.drawn and int(issues or 0) < self.live.get(number, math.inf)


TRAINER = "trainer"
"""The one that there is unless several are named."""


class LedgerError(Exception):
    """A transition that the life of a group does not have: a defect of the caller."""


@dataclass(slots=True)
class _Delivery:
    """A batch on its way through the trainers."""

    group_ids: tuple[str, ...]
    to_get: set[str]
    """Trainers that did not ask for it yet."""
    to_commit: set[str]


class Ledger:
    """Live groups by id, ended ones as counts: memory does not grow with the run."""

    def __init__(self, trainers: Sequence[str] = (TRAINER,)) -> None:
        """`trainers` are those that train on every batch."""
        self._trainers = frozenset(trainers)
        self._live: dict[str, GroupState] = {}
        self._delivered: dict[int, _Delivery] = {}
        self._committed: set[int] = set()
        self._taken_back: list[str] = []
        """Groups that were delivered, and that nobody will train in this attempt."""
        self._ended: Counter[GroupState] = Counter()
        self.drop_reasons: Counter[str] = Counter()
        """How many groups were dropped or filtered, by reason."""

    def counts(self) -> Mapping[GroupState, int]:
        """Groups by state, ended ones included."""
        totals = Counter(self._live.values()) + self._ended
        return {state: totals[state] for state in GroupState}

    @property
    def ended(self) -> Mapping[str, int]:
        """Groups that ended, by state."""
        return {state.value: count for state, count in self._ended.items()}

    def restore(
        self, finished: Sequence[str], ended: Mapping[str, int], drop_reasons: Mapping[str, int]
    ) -> GroupsRestored:
        """Goes on from the books of an earlier attempt; before anything is admitted."""
        self._live.update(dict.fromkeys(finished, GroupState.FINISHED))
        self._ended.update({GroupState(state): count for state, count in ended.items()})
        self.drop_reasons.update(drop_reasons)
        return GroupsRestored(group_ids=tuple(finished))

    def settle(self, step: int, trainer: str = TRAINER) -> tuple[GroupsTrained | None, tuple[str, ...]]:
        """The job ends when `trainer` has trained the batches before that of `step`: nothing stays open for it.

        Commits the last of them where that is not done, and takes back what only `trainer` got and did not train.
        Returns the event of the batch's end, if that was it, and the groups that were taken back.
        """
        self._check_known(trainer)
        last, trained = self._delivered.get(step - 1), None
        if last is not None and trainer in last.to_commit - last.to_get:
            trained = self.commit(step - 1, trainer)
        untrained = [
            rollout_id
            for rollout_id, delivery in self._delivered.items()
            if rollout_id >= step and trainer in delivery.to_commit and delivery.to_get >= self._trainers - {trainer}
        ]
        group_ids = tuple(group_id for each in untrained for group_id in self._delivered.pop(each).group_ids)
        self._taken_back += group_ids
        return trained, group_ids

    def check_all_committed(self) -> None:
        """Raises RolloutError where a batch is with the trainer: nobody knows yet whether it was trained."""
        if self._delivered:
            raise RolloutError(
                f"rollout {min(self._delivered)} was delivered and not committed; save after a commit and before a get"
            )

    def admit(self, group_id: str, prompt_id: str, epoch: int) -> GroupAdmitted:
        if group_id in self._live:
            raise LedgerError(f"group {group_id} is already {self._live[group_id]}")
        self._live[group_id] = GroupState.ADMITTED
        return GroupAdmitted(group_id=group_id, prompt_id=prompt_id, epoch=epoch)

    def run(self, group_id: str) -> GroupRunning:
        self._move(group_id, GroupState.ADMITTED, GroupState.RUNNING)
        return GroupRunning(group_id=group_id)

    def finish(self, group_id: str, usable: int, failed: int) -> GroupFinished:
        self._move(group_id, GroupState.RUNNING, GroupState.FINISHED)
        return GroupFinished(group_id=group_id, usable=usable, failed=failed)

    def check_deliverable(self, rollout_id: int, trainer: str = TRAINER) -> None:
        """Raises RolloutError when `trainer` got `rollout_id` before, or is unknown."""
        self._check_known(trainer)
        delivery = self._delivered.get(rollout_id)
        if rollout_id in self._committed or (delivery is not None and trainer not in delivery.to_get):
            state = "delivered" if delivery is not None and trainer in delivery.to_commit else "committed"
            raise RolloutError(f"rollout {rollout_id} was already {state}; get each rollout id once")

    def deliver(self, rollout_id: int, group_ids: Sequence[str], trainer: str = TRAINER) -> GroupsDelivered:
        """The first trainer gets the batch."""
        self.check_deliverable(rollout_id, trainer)
        for group_id in group_ids:
            self._move(group_id, GroupState.FINISHED, GroupState.DELIVERED)
        others = set(self._trainers - {trainer})
        self._delivered[rollout_id] = _Delivery(tuple(group_ids), others, set(self._trainers))
        return GroupsDelivered(rollout_id=rollout_id, group_ids=tuple(group_ids))

    def share(self, rollout_id: int, trainer: str) -> bool:
        """Another trainer gets a batch that was delivered; returns whether others still have to."""
        self.check_deliverable(rollout_id, trainer)
        delivery = self._delivered[rollout_id]
        delivery.to_get.remove(trainer)
        return bool(delivery.to_get)

    def commit(self, rollout_id: int, trainer: str = TRAINER) -> GroupsTrained | None:
        """Returns the event of their end with the last trainer's commit.

        Raises RolloutError when `rollout_id` was not delivered to `trainer`, or was committed by it before.
        """
        self._check_known(trainer)
        delivery = self._delivered.get(rollout_id)
        if delivery is None or trainer in delivery.to_get or trainer not in delivery.to_commit:
            committed = rollout_id in self._committed or (delivery is not None and trainer not in delivery.to_commit)
            reason = "was already committed" if committed else "was never delivered"
            raise RolloutError(f"rollout {rollout_id} {reason}; commit each rollout id once, after get")
        delivery.to_commit.remove(trainer)
        if delivery.to_commit:
            return None
        del self._delivered[rollout_id]
        self._committed.add(rollout_id)
        for group_id in delivery.group_ids:
            self._end(group_id, GroupState.TRAINED)
        return GroupsTrained(rollout_id=rollout_id, group_ids=delivery.group_ids)

    def filter(self, group_id: str, reason: str) -> GroupFiltered:
        self._require(group_id, GroupState.FINISHED)
        self.drop_reasons[reason] += 1
        self._end(group_id, GroupState.FILTERED)
        return GroupFiltered(group_id=group_id, reason=reason)

    def drop(self, group_id: str, reason: str) -> GroupDropped:
        self._require(group_id, GroupState.ADMITTED, GroupState.RUNNING, GroupState.FINISHED)
        self.drop_reasons[reason] += 1
        self._end(group_id, GroupState.DROPPED)
        return GroupDropped(group_id=group_id, reason=reason)

    def drop_delivered(self, reason: str) -> tuple[GroupDropped, ...]:
        """Ends all groups that were delivered and not committed: nobody will train them in this attempt."""
        open_ = (group_id for delivery in self._delivered.values() for group_id in delivery.group_ids)
        group_ids = [*self._taken_back, *open_]
        self._delivered.clear()
        self._taken_back.clear()
        self.drop_reasons[reason] += len(group_ids)
        for group_id in group_ids:
            self._end(group_id, GroupState.DROPPED)
        return tuple(GroupDropped(group_id=group_id, reason=reason) for group_id in group_ids)

    def _check_known(self, trainer: str) -> None:
        if trainer not in self._trainers:
            known = ", ".join(sorted(self._trainers))
            raise RolloutError(f"no trainer {trainer!r} was named to the executor, but {known}")

    def _require(self, group_id: str, *allowed: GroupState) -> None:
        state = self._live.get(group_id)
        if state not in allowed:
            raise LedgerError(f"group {group_id} is {state or 'not live'}, not {' or '.join(allowed)}")

    def _move(self, group_id: str, before: GroupState, after: GroupState) -> None:
        self._require(group_id, before)
        self._live[group_id] = after

    def _end(self, group_id: str, state: GroupState) -> None:
        del self._live[group_id]
        self._ended[state] += 1


def rolled_back(events: Iterable[Mapping[str, Any]], reached: Reached | None) -> tuple[str, ...]:
    """Groups that `events` (the log of all attempts) tell have ended since a job was saved that now goes on, in order.

    `reached` is how far it was when it was saved; None for a job that begins anew.
    """
    ended: dict[str, None] = {}
    for event in events:
        match event.get("kind"):
            case GroupsTrained.kind:
                ended.update(dict.fromkeys(event["group_ids"]))
            case GroupFiltered.kind | GroupDropped.kind:
                ended[event["group_id"]] = None
            case GroupsRolledBack.kind:
                for group_id in event["group_ids"]:
                    ended.pop(group_id, None)
    return tuple(group_id for group_id in ended if reached is None or not reached.had_ended(group_id))
