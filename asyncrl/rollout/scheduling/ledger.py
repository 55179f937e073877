"""The ledger: the live groups by state, and the only place that changes the state of one.

| transition                                | event           | method           |
|-------------------------------------------|-----------------|------------------|
| (new) → admitted                          | GroupAdmitted   | `admit`          |
| (saved) → finished                        | GroupsRestored  | `restore`        |
| admitted → running                        | GroupRunning    | `start`          |
| running → finished                        | GroupFinished   | `finish`         |
| finished → delivered                      | GroupsDelivered | `deliver`        |
| delivered → trained                       | GroupsTrained   | `train`          |
| finished → filtered                       | GroupFiltered   | `filter`         |
| admitted or running or finished → dropped | GroupDropped    | `drop`           |
| delivered → dropped, when the job ends    | GroupDropped    | `drop_delivered` |

Invariants
- A group is admitted once per attempt of the job and ends once: trained, filtered or dropped. Any transition that the
  table does not have raises LedgerError and changes nothing.
- Each transition emits its event.
- Groups that ended are only counted, so memory does not grow with the run.
- A group that an earlier attempt of the job finished, and that no batch took, begins as finished; the counts go on.
- Across attempts, each group that was not rolled back ends exactly once. Its id is the same in each attempt.

No I/O and no clock; events go to the function that the constructor takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.data.sample import SampleGroup
from asyncrl.observability.events import Event
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
from asyncrl.rollout.scheduling.group import ENDS, Group, GroupState, Issue, executor_of

_UNDELIVERED = (GroupState.ADMITTED, GroupState.RUNNING, GroupState.FINISHED)


class LedgerError(Exception):
    """A transition that the life of a group does not have: a defect of the caller."""


class Ledger:
    """Live groups as records, ended groups as counts; see the module's docstring."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        """`emit` gets the event of each transition."""
        self._emit = emit
        self._live: dict[GroupState, dict[str, Group]] = {s: {} for s in GroupState if s not in ENDS}
        """In each state, in the order in which groups came to it."""
        self._due: dict[GroupState, Counter[int]] = {GroupState.RUNNING: Counter(), GroupState.FINISHED: Counter()}
        """Groups by deadline; no count is 0."""
        self._admitted = 0
        self._ended: Counter[GroupState] = Counter()
        self.drop_reasons: Counter[str] = Counter()
        """How many groups were dropped or filtered, by reason."""

    # what there is

    def groups(self, state: GroupState) -> Collection[Group]:
        """The groups in a live state, in the order in which they came to it."""
        return self._live[state].values()

    def due(self, state: GroupState) -> Mapping[int, int]:
        """How many groups in `state` (RUNNING or FINISHED) have each deadline."""
        return self._due[state]

    def undelivered(self) -> list[Group]:
        """Live groups that no batch took, as admitted."""
        return sorted((g for state in _UNDELIVERED for g in self.groups(state)), key=lambda group: group.order)

    def counts(self) -> Mapping[GroupState, int]:
        """Groups by state, ended ones included."""
        live = {state: len(groups) for state, groups in self._live.items()}
        return {state: live.get(state, self._ended[state]) for state in GroupState}

    @property
    def ended(self) -> Mapping[str, int]:
        """Groups that ended, by state."""
        return {state.value: count for state, count in self._ended.items()}

    # transitions

    def admit(self, issue: Issue) -> Group:
        """A new group. LedgerError when a group of this id is live."""
        group = self._new(issue)
        self._enter(group)
        self._emit(GroupAdmitted(group_id=group.group_id, prompt_id=issue.prompt.prompt_id, epoch=issue.epoch))
        return group

    def restore(self, finished: Iterable[tuple[Issue, SampleGroup, int]]) -> None:
        """Groups that an earlier attempt finished, each with its result and deadline; before any is admitted."""
        groups = []
        for issue, result, deadline in finished:
            group = self._new(issue)
            group.state, group.result, group.deadline = GroupState.FINISHED, result, deadline
            self._enter(group)
            groups.append(group)
        self._emit(GroupsRestored(group_ids=_ids(groups)))

    def continue_counts(self, ended: Mapping[str, int], drop_reasons: Mapping[str, int]) -> None:
        """Adds what an earlier attempt counted: `ended` and `drop_reasons` of its ledger."""
        self._ended.update({GroupState(state): count for state, count in ended.items()})
        self.drop_reasons.update(drop_reasons)

    def start(self, group: Group, deadline: int) -> None:
        """Its first request is under way; `deadline` is a lower bound."""
        self._move(group, GroupState.RUNNING, GroupState.ADMITTED, deadline=deadline)
        self._emit(GroupRunning(group_id=group.group_id))

    def finish(self, group: Group, result: SampleGroup, deadline: int) -> None:
        """All its samples have ended, and enough of them are usable."""
        self._move(group, GroupState.FINISHED, GroupState.RUNNING, deadline=deadline)
        group.result = result
        usable = sum(sample.reward is not None for sample in result.samples)
        self._emit(GroupFinished(group_id=group.group_id, usable=usable, failed=len(result.samples) - usable))

    def deliver(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """The trainer gets these groups as one batch."""
        for group in groups:
            self._move(group, GroupState.DELIVERED, GroupState.FINISHED)
        self._emit(GroupsDelivered(rollout_id=rollout_id, group_ids=_ids(groups)))

    def train(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """Every trainer has trained the batch of these groups."""
        for group in groups:
            self._move(group, GroupState.TRAINED, GroupState.DELIVERED)
        self._emit(GroupsTrained(rollout_id=rollout_id, group_ids=_ids(groups)))

    def filter(self, group: Group, reason: str) -> None:
        """A filter takes a finished group out."""
        self._move(group, GroupState.FILTERED, GroupState.FINISHED)
        self.drop_reasons[reason] += 1
        self._emit(GroupFiltered(group_id=group.group_id, reason=reason))

    def drop(self, group: Group, reason: str) -> None:
        """No batch will take this group."""
        self._move(group, GroupState.DROPPED, *_UNDELIVERED)
        self.drop_reasons[reason] += 1
        self._emit(GroupDropped(group_id=group.group_id, reason=reason))

    def drop_delivered(self, reason: str) -> None:
        """The job ends: no trainer will train the groups that were delivered and are not trained."""
        for group in tuple(self.groups(GroupState.DELIVERED)):
            self._move(group, GroupState.DROPPED, GroupState.DELIVERED)
            self.drop_reasons[reason] += 1
            self._emit(GroupDropped(group_id=group.group_id, reason=reason))

    # the one place where a record changes

    def _new(self, issue: Issue) -> Group:
        for state, groups in self._live.items():
            if issue.group_id in groups:
                raise LedgerError(f"group {issue.group_id} is already {state}")
        self._admitted += 1
        return Group(issue, self._admitted)

    def _move(self, group: Group, to: GroupState, *before: GroupState, deadline: int | None = None) -> None:
        """Moves `group` from one of the states `before` to the state `to`. LedgerError where it is in none of them."""
        state, group_id = group.state, group.group_id
        if state not in before:
            found = "not live" if group.ended else state
            raise LedgerError(f"group {group_id} is {found}, not {' or '.join(before)}")
        del self._live[state][group_id]
        if (due := self._due.get(state)) is not None and group.deadline is not None:
            due[group.deadline] -= 1
            if not due[group.deadline]:
                del due[group.deadline]
        group.state, group.result = to, None
        if deadline is not None:
            group.deadline = deadline
        if to in self._live:
            self._enter(group)
        else:
            self._ended[to] += 1

    def _enter(self, group: Group) -> None:
        self._live[group.state][group.group_id] = group
        if (due := self._due.get(group.state)) is not None and group.deadline is not None:
            due[group.deadline] += 1


def _ids(groups: Iterable[Group]) -> tuple[str, ...]:
    return tuple(group.group_id for group in groups)


# what a resume rolls back


@dataclass(frozen=True, slots=True)
class Reached:
    """How far the groups of a job were when it was saved."""

    drawn: int
    """Prompts drawn: the ordinal of the next draw."""
    live: Mapping[int, int]
    """Groups that had not ended: ordinal → how often the prompt was issued before."""

    def had_ended(self, group_id: str) -> bool:
        """Whether this group had ended by then."""
        ordinal, _, issues = group_id.rpartition("-")[2].partition("r")
        number = int(ordinal)
        return number < self.drawn and int(issues or 0) < self.live.get(number, math.inf)


def rolled_back(events: Iterable[Mapping[str, Any]], reached: Reached | None, executor: str = "") -> tuple[str, ...]:
    """The groups of `executor` that ended after the save from which a job resumes, in the order of their ends.

    `events` is the log of all attempts. `reached` is the state at the save; None for a job that begins anew.
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
    its_own = (group_id for group_id in ended if executor_of(group_id) == executor)
    return tuple(group_id for group_id in its_own if reached is None or not reached.had_ended(group_id))
