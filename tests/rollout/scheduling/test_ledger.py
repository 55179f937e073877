from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.data.sample import Prompt, SampleGroup
from asyncrl.errors import RolloutError
from asyncrl.observability.events import Event, EventLog
from asyncrl.rollout.group_events import (
    GroupAdmitted,
    GroupDropped,
    GroupFiltered,
    GroupFinished,
    GroupRunning,
    GroupsDelivered,
    GroupsRolledBack,
    GroupsTrained,
)
from asyncrl.rollout.scheduling.deliveries import Deliveries
from asyncrl.rollout.scheduling.group import Group, GroupState, Issue, group_id_of
from asyncrl.rollout.scheduling.ledger import Ledger, LedgerError, Reached, rolled_back

PROMPT = Prompt("p", "", np.empty(0, np.int32))
MADE = SampleGroup("", PROMPT, ())
UNDELIVERED = (GroupState.ADMITTED, GroupState.RUNNING, GroupState.FINISHED)


def issue(ordinal: int) -> Issue:
    return Issue(ordinal, PROMPT, epoch=0)


def finished(ledger: Ledger, ordinal: int) -> Group:
    group = ledger.admit(issue(ordinal))
    ledger.start(group, 0)
    ledger.finish(group, MADE, 0)
    return group


class LedgerModel(RuleBasedStateMachine):
    """Any order of legal transitions keeps every group in exactly one place, and each transition emits its event."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.ledger = Ledger(self.events.append)
        self.deliveries = Deliveries()
        self.states: dict[Group, GroupState] = {}
        """What is to be true of every group ever admitted."""
        self.rollouts = 0
        self.delivered: dict[int, tuple[Group, ...]] = {}
        self.deadlines = 0

    def groups(self, *states: GroupState) -> list[Group]:
        return [group for group, at in self.states.items() if at in states]

    def pick(self, data: st.DataObject, *states: GroupState) -> Group:
        return data.draw(st.sampled_from(self.groups(*states)))

    def set(self, groups: Iterable[Group], state: GroupState) -> None:
        self.states.update(dict.fromkeys(groups, state))

    def emitted(self, *kinds: type[Event]) -> None:
        assert [type(event) for event in self.events] == [*kinds]
        self.events.clear()

    def deadline(self) -> int:
        """Several groups share one."""
        self.deadlines += 1
        return self.deadlines // 3

    @rule()
    def admit(self) -> None:
        group = self.ledger.admit(issue(len(self.states)))
        self.set([group], GroupState.ADMITTED)
        self.emitted(GroupAdmitted)

    @precondition(lambda self: self.groups(GroupState.ADMITTED))
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        group = self.pick(data, GroupState.ADMITTED)
        self.ledger.start(group, self.deadline())
        self.set([group], GroupState.RUNNING)
        self.emitted(GroupRunning)

    @precondition(lambda self: self.groups(GroupState.RUNNING))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        group = self.pick(data, GroupState.RUNNING)
        self.ledger.finish(group, MADE, self.deadline())
        self.set([group], GroupState.FINISHED)
        self.emitted(GroupFinished)

    @precondition(lambda self: self.groups(GroupState.FINISHED))
    @rule(data=st.data())
    def filter(self, data: st.DataObject) -> None:
        group = self.pick(data, GroupState.FINISHED)
        self.ledger.filter(group, "reason")
        self.set([group], GroupState.FILTERED)
        self.emitted(GroupFiltered)

    @precondition(lambda self: self.groups(*UNDELIVERED))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        group = self.pick(data, *UNDELIVERED)
        self.ledger.drop(group, "reason")
        self.set([group], GroupState.DROPPED)
        self.emitted(GroupDropped)

    @rule()
    def deliver(self) -> None:
        groups = tuple(self.groups(GroupState.FINISHED))
        self.ledger.deliver(self.rollouts, groups)
        self.deliveries.deliver(self.rollouts, groups)
        self.delivered[self.rollouts] = groups
        self.rollouts += 1
        self.set(groups, GroupState.DELIVERED)
        self.emitted(GroupsDelivered)

    def train(self, rollout: int, groups: tuple[Group, ...]) -> None:
        self.ledger.train(rollout, groups)
        self.set(groups, GroupState.TRAINED)
        self.emitted(GroupsTrained)

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        rollout = data.draw(st.sampled_from(sorted(self.delivered)))
        groups = self.delivered.pop(rollout)
        assert self.deliveries.commit(rollout) == groups
        self.train(rollout, groups)

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(0, self.rollouts))
        last = self.delivered.pop(step - 1, None)
        for rollout in [rollout for rollout in self.delivered if rollout >= step]:
            del self.delivered[rollout]  # taken back: its groups stay delivered
        assert self.deliveries.settle(step) == last
        if last is not None:
            self.train(step - 1, last)
        if self.delivered:  # of a step that was given up before it began: nobody may say that it was trained
            with pytest.raises(RolloutError, match="delivered and not committed"):
                self.deliveries.check_all_committed()
        else:
            self.deliveries.check_all_committed()

    @rule()
    def end_the_job(self) -> None:
        groups = [*self.ledger.groups(GroupState.DELIVERED)]
        assert set(groups) == set(self.groups(GroupState.DELIVERED))
        self.ledger.drop_delivered("the end")
        self.deliveries.forget()
        assert [getattr(event, "group_id", None) for event in self.events] == [group.group_id for group in groups]
        self.emitted(*[GroupDropped] * len(groups))
        self.delivered.clear()
        self.set(groups, GroupState.DROPPED)

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        counts = Counter(self.states.values())
        assert self.ledger.counts() == {state: counts[state] for state in GroupState}
        assert all(group.state is state for group, state in self.states.items())
        undelivered = self.groups(*UNDELIVERED)
        assert self.ledger.undelivered() == undelivered
        for state in (GroupState.RUNNING, GroupState.FINISHED):
            assert self.ledger.due(state) == Counter(group.deadline for group in self.groups(state))
        assert all((group.result is MADE) is (group.state is GroupState.FINISHED) for group in self.states)


TestLedgerModel = LedgerModel.TestCase
TestLedgerModel.settings = settings(max_examples=20, stateful_step_count=30)


def a_log(*events: Event) -> list[dict[str, Any]]:
    log = EventLog(None)
    for event in events:
        log.emit(event)
    return log.recent


def trained(rollout_id: int, *group_ids: str) -> GroupsTrained:
    return GroupsTrained(rollout_id=rollout_id, group_ids=group_ids)


def dropped(group_id: str) -> GroupDropped:
    return GroupDropped(group_id=group_id, reason="late")


def filtered(group_id: str) -> GroupFiltered:
    return GroupFiltered(group_id=group_id, reason="all equal")


G = [group_id_of(ordinal, 0) for ordinal in range(9)]


def test_every_group_that_ended_after_the_checkpoint_is_rolled_back_however_it_ended() -> None:
    log = a_log(
        trained(0, G[0], G[2]), filtered(G[1]), dropped(G[3]), filtered(G[4]), trained(1, G[5], G[6]), dropped(G[7])
    )
    reached = Reached(6, {3: 0, 5: 0})  # saved after the first step: 4 was filtered while the others were not finished
    assert rolled_back(log, reached) == (G[3], G[5], G[6], G[7])
    assert rolled_back(log, None) == (G[0], G[2], G[1], G[3], G[4], G[5], G[6], G[7])


def test_a_group_that_was_issued_again_had_ended_only_as_what_it_was_before() -> None:
    late, later = group_id_of(3, 1), group_id_of(3, 2)
    log = a_log(dropped(G[3]), dropped(late), trained(1, later))
    assert rolled_back(log, Reached(6, {3: 1})) == (late, later)


def test_what_was_rolled_back_once_is_rolled_back_again_only_where_it_ended_again() -> None:
    log = a_log(dropped(G[3]), trained(0, G[4]), GroupsRolledBack(step=0, group_ids=(G[3], G[4])), trained(0, G[3]))
    assert rolled_back(log, None) == (G[3],)


def test_each_executor_rolls_back_its_own_groups() -> None:
    code = [group_id_of(ordinal, issues, "code") for ordinal, issues in ((0, 0), (3, 0), (3, 1), (7, 0))]
    log = a_log(trained(0, G[0], *code[:2]), dropped(G[3]), filtered(code[2]), trained(1, G[7], code[3]))
    assert rolled_back(log, Reached(6, {3: 0})) == (G[3], G[7])
    assert rolled_back(log, Reached(6, {3: 1}), "code") == (code[2], code[3])
    assert rolled_back(log, None, "code") == tuple(code) and rolled_back(log, None, "math") == ()


def test_no_group_ends_twice_or_skips_a_state() -> None:
    ledger = Ledger(lambda event: None)
    a = finished(ledger, 0)
    with pytest.raises(LedgerError, match="00000000 is already finished"):
        ledger.admit(issue(0))
    ledger.deliver(0, [a])
    for move in (lambda: ledger.drop(a, ""), lambda: ledger.filter(a, ""), lambda: ledger.start(a, 0)):
        with pytest.raises(LedgerError, match="group 00000000 is delivered"):
            move()
    ledger.train(0, [a])
    with pytest.raises(LedgerError, match="group 00000000 is not live"):
        ledger.drop(a, "")
    b = ledger.admit(issue(1))
    with pytest.raises(LedgerError, match="group 00000001 is admitted, not finished"):
        ledger.deliver(1, [b])
