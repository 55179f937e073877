from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.errors import RolloutError
from asyncrl.observability.events import Event, EventLog
from asyncrl.rollout.group_events import GroupDropped, GroupFiltered, GroupsRolledBack, GroupsTrained
from asyncrl.rollout.scheduling.ledger import GroupState, Ledger, LedgerError, Reached, group_id_of, rolled_back


def test_several_trainers_get_and_commit_the_same_batch_each_for_itself() -> None:
    ledger = Ledger(("actor", "critic"))
    ledger.admit("a", "p", 0)
    ledger.run("a")
    ledger.finish("a", 2, 0)
    with pytest.raises(RolloutError, match="no trainer 'judge' was named to the executor, but actor, critic"):
        ledger.check_deliverable(0, "judge")
    ledger.deliver(0, ["a"], "actor")
    with pytest.raises(RolloutError, match="rollout 0 was never delivered"):
        ledger.commit(0, "critic")
    with pytest.raises(RolloutError, match="rollout 0 was already delivered"):
        ledger.check_deliverable(0, "actor")
    assert ledger.commit(0, "actor") is None
    for again in (lambda: ledger.check_deliverable(0, "actor"), lambda: ledger.commit(0, "actor")):
        with pytest.raises(RolloutError, match="rollout 0 was already committed"):
            again()
    with pytest.raises(RolloutError, match="delivered and not committed"):
        ledger.check_all_committed()
    assert ledger.share(0, "critic") is False
    trained = ledger.commit(0, "critic")
    assert trained is not None and trained.group_ids == ("a",)
    assert {state: count for state, count in ledger.counts().items() if count} == {GroupState.TRAINED: 1}
    for trainer in ("actor", "critic"):
        with pytest.raises(RolloutError, match="rollout 0 was already committed"):
            ledger.check_deliverable(0, trainer)


def with_the_actor(*rollout_ids: int) -> Ledger:
    """Each batch is of one group; the actor has got these, and trained none."""
    ledger = Ledger(("actor", "critic"))
    for rollout_id in rollout_ids:
        ledger.admit(G[rollout_id], "p", 0)
        ledger.run(G[rollout_id])
        ledger.finish(G[rollout_id], 2, 0)
        ledger.deliver(rollout_id, [G[rollout_id]], "actor")
    return ledger


def test_where_one_of_several_trainers_ends_the_books_of_the_others_stay_open() -> None:
    ledger = with_the_actor(0, 1, 2)
    ledger.share(0, "critic")
    ledger.share(1, "critic")
    ledger.commit(0, "critic")
    ledger.commit(1, "critic")
    trained, taken_back = ledger.settle(1, "actor")
    assert trained is not None and trained.rollout_id == 0
    assert taken_back == (G[2],), "the critic has got 1, and may have learnt from it"
    assert ledger.settle(1, "actor") == (None, ())
    with pytest.raises(RolloutError, match="rollout 1 was delivered and not committed"):
        ledger.check_all_committed()
    with pytest.raises(RolloutError, match="no trainer 'judge' was named to the executor, but actor, critic"):
        ledger.settle(1, "judge")

    ledger = with_the_actor(0)
    assert ledger.settle(1, "actor") == (None, ()), "the critic did not even get it"
    with pytest.raises(RolloutError, match="rollout 0 was delivered and not committed"):
        ledger.check_all_committed()


class LedgerModel(RuleBasedStateMachine):
    """Any order of legal transitions keeps every group in exactly one place."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.states: dict[str, GroupState] = {}
        """What is to be true of every group ever admitted."""
        self.rollouts = 0
        self.delivered: dict[int, tuple[str, ...]] = {}
        self.taken_back: list[str] = []

    def groups(self, state: GroupState) -> list[str]:
        return [group for group, at in self.states.items() if at is state]

    def pick(self, data: st.DataObject, state: GroupState) -> str:
        return data.draw(st.sampled_from(self.groups(state)))

    def set(self, groups: Iterable[str], state: GroupState) -> None:
        self.states.update(dict.fromkeys(groups, state))

    @rule()
    def admit(self) -> None:
        group = f"{len(self.states):08d}"
        self.ledger.admit(group, "p", 0)
        self.set([group], GroupState.ADMITTED)

    @precondition(lambda self: self.groups(GroupState.ADMITTED))
    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        group = self.pick(data, GroupState.ADMITTED)
        self.ledger.run(group)
        self.set([group], GroupState.RUNNING)

    @precondition(lambda self: self.groups(GroupState.RUNNING))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        group = self.pick(data, GroupState.RUNNING)
        self.ledger.finish(group, 2, 0)
        self.set([group], GroupState.FINISHED)

    @precondition(lambda self: self.groups(GroupState.FINISHED))
    @rule(data=st.data(), how=st.sampled_from([GroupState.DROPPED, GroupState.FILTERED]))
    def leave(self, data: st.DataObject, how: GroupState) -> None:
        group = self.pick(data, GroupState.FINISHED)
        (self.ledger.drop if how is GroupState.DROPPED else self.ledger.filter)(group, "reason")
        self.set([group], how)

    @rule()
    def deliver(self) -> None:
        groups = self.groups(GroupState.FINISHED)
        self.delivered[self.rollouts] = self.ledger.deliver(self.rollouts, groups).group_ids
        self.rollouts += 1
        self.set(groups, GroupState.DELIVERED)

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        rollout = data.draw(st.sampled_from(sorted(self.delivered)))
        groups = self.delivered.pop(rollout)
        trained = self.ledger.commit(rollout)
        assert trained is not None and trained.group_ids == groups
        self.set(groups, GroupState.TRAINED)

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(0, self.rollouts))
        last = self.delivered.pop(step - 1, None)
        later = tuple(rollout for rollout in self.delivered if rollout >= step)
        trained, taken_back = self.ledger.settle(step)
        assert (trained and trained.group_ids) == last
        assert taken_back == tuple(group for rollout in later for group in self.delivered.pop(rollout))
        self.set(last or (), GroupState.TRAINED)
        self.taken_back += taken_back
        if self.delivered:  # of a step that was given up before it began: nobody may say that it was trained
            with pytest.raises(RolloutError, match="delivered and not committed"):
                self.ledger.check_all_committed()
        else:
            self.ledger.check_all_committed()

    @rule()
    def end_the_job(self) -> None:
        groups = [*self.taken_back, *(group for batch in self.delivered.values() for group in batch)]
        self.taken_back.clear()
        assert [event.group_id for event in self.ledger.drop_delivered("the end")] == groups
        self.delivered.clear()
        self.set(groups, GroupState.DROPPED)

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        counts = Counter(self.states.values())
        assert self.ledger.counts() == {state: counts[state] for state in GroupState}


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


def finished(ledger: Ledger, group_id: str) -> None:
    ledger.admit(group_id, "p", 0)
    ledger.run(group_id)
    ledger.finish(group_id, 1, 0)


def test_get_and_commit_out_of_order_are_errors_that_say_so() -> None:
    ledger = Ledger()
    with pytest.raises(RolloutError, match="rollout 0 was never delivered"):
        ledger.commit(0)
    finished(ledger, "a")
    ledger.deliver(0, ["a"])
    with pytest.raises(RolloutError, match="rollout 0 was already delivered"):
        ledger.deliver(0, [])
    ledger.commit(0)
    with pytest.raises(RolloutError, match="rollout 0 was already committed"):
        ledger.commit(0)
    with pytest.raises(RolloutError, match="rollout 0 was already committed"):
        ledger.check_deliverable(0)


def test_no_group_ends_twice_or_skips_a_state() -> None:
    ledger = Ledger()
    finished(ledger, "a")
    with pytest.raises(LedgerError, match="already finished"):
        ledger.admit("a", "p", 0)
    ledger.deliver(0, ["a"])
    for move in (lambda: ledger.drop("a", ""), lambda: ledger.filter("a", ""), lambda: ledger.run("a")):
        with pytest.raises(LedgerError, match="group a is delivered"):
            move()
    ledger.commit(0)
    with pytest.raises(LedgerError, match="group a is not live"):
        ledger.drop("a", "")
    ledger.admit("b", "p", 0)
    with pytest.raises(LedgerError, match="group b is admitted, not finished"):
        ledger.deliver(1, ["b"])
