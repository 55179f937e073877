from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.sample import Prompt, SampleGroup
from asyncrl.rollout.scheduling.admission import Admission, Batch, Limits, Waiting
from asyncrl.rollout.scheduling.group import Group, GroupState, Issue
from asyncrl.rollout.scheduling.ledger import Ledger

PROMPT = Prompt("p", "", np.empty(0, np.int32))
MADE = SampleGroup("", PROMPT, ())


@dataclass
class Rule:
    """The rule and the ledger that it reads; groups go by the number of their admission."""

    limits: Limits
    rule: type[Admission] = Admission
    first: int = 0
    published: int | None = 0

    def __post_init__(self) -> None:
        self.ledger = Ledger(lambda event: None)
        self.admission = self.rule(self.limits, self.ledger)
        self.admission.begin(self.first)
        if self.published is not None:
            self.admission.publish(self.published)

    def admit(self, ordinal: int) -> Group:
        return self.ledger.admit(Issue(ordinal, PROMPT, 0))

    def start(self, group: Group) -> None:
        self.ledger.start(group, self.admission.newest_deadline)

    def finish(self, group: Group, oldest: int | None) -> bool:
        """Whether some batch to come may train it."""
        deadline = self.admission.deadline(group, oldest)
        self.ledger.finish(group, MADE, deadline)
        return deadline >= self.admission.step

    def finished(self, group: Group, oldest: int | None = 0) -> None:
        self.start(group)
        self.finish(group, oldest)

    def drop(self, group: Group) -> None:
        self.ledger.drop(group, "")

    def take(self, batch: Batch | Waiting) -> None:
        assert isinstance(batch, Batch)
        for group in (*batch.surplus, *batch.reissue):
            self.drop(group)
        self.ledger.deliver(self.admission.step, batch.groups)
        self.admission.advance()

    def decision(self) -> tuple[tuple[int, ...], ...] | Waiting:
        """The next batch as numbers: its groups, the surplus, what is issued again."""
        decision = self.admission.next_batch()
        if isinstance(decision, Waiting):
            return decision
        return tuple(numbers(groups) for groups in (decision.groups, decision.surplus, decision.reissue))


def numbers(groups: Iterable[Group]) -> tuple[int, ...]:
    return tuple(group.issue.ordinal for group in groups)


class Broken(AssertionError):
    """The rule let something through."""


@dataclass
class Job:
    """A job around the rule: engines with slots, a filter, failures, updates every so many steps, crashes."""

    limits: Limits
    interval: int
    dice: random.Random
    rule: type[Admission] = Admission
    slots: int = 8
    filtered: float = 0.0
    failed: float = 0.0
    crashed: float = 0.0
    ids: Iterator[int] = field(default_factory=lambda: iter(range(1 << 40)))
    started: dict[Group, int] = field(default_factory=dict)
    """Running groups: the step published when they began."""
    queue: list[Group] = field(default_factory=list)
    oldest: dict[Group, int] = field(default_factory=dict)
    """Finished groups: the step of their oldest token."""
    taken: list[tuple[Group, ...]] = field(default_factory=list)
    dropped: int = 0

    def begin(self, steps: int, first: int) -> None:
        self.books = Rule(self.limits, self.rule, first, first)
        self.admission = self.books.admission
        self.admission.extend(steps)
        self.published = first

    def run(self, steps: int) -> None:
        self.begin(steps, 0)
        step = 0
        while step < steps:
            for _ in range(self.dice.randrange(2 * self.limits.batch)):
                self.event()
            batch = self.take(step)
            self.taken.append(batch)
            for _ in range(self.dice.randrange(2 * self.limits.batch)):  # while it is trained
                self.event()
            step += 1
            if step % self.interval == 0:
                self.published = step
                self.admission.publish(step)
                if self.dice.random() < self.crashed:
                    step = self.resume(steps, step - self.dice.choice([0, 0, self.interval]))

    def take(self, step: int) -> tuple[Group, ...]:
        for _ in range(10_000):
            match self.admission.next_batch():
                case Batch() as batch:
                    self.check(batch, step)
                    self.books.take(batch)
                    for group in (*batch.surplus, *batch.reissue):
                        self.forget(group)
                    return batch.groups
                case Waiting() as waiting:
                    known = {*self.started, *self.queue}
                    if not self.event():
                        raise Broken(f"stuck at step {step}: {waiting}")
                    if not waiting.missing and not known.intersection(waiting.groups):
                        raise Broken(f"waits for nobody: {waiting}")
        raise Broken(f"no batch for step {step}")

    def check(self, batch: Batch, step: int) -> None:
        assert len(batch.groups) == len(set(batch.groups)) == self.limits.batch
        for group in batch.groups:
            if step - self.oldest[group] > self.limits.staleness:
                raise Broken(f"{group.group_id}: weights of step {self.oldest[group]} at step {step}")
        if len(batch.surplus) > self.limits.oversample:
            raise Broken(f"{len(batch.surplus)} dropped, {self.limits.oversample} allowed")
        if batch.reissue:
            assert self.limits.straggler == "reissue" and not set(batch.reissue) & set(self.oldest)
        self.dropped += len(batch.surplus) + len(batch.reissue)

    def event(self) -> bool:
        """Something happens; False when nothing can."""
        while self.admission.room:
            self.queue.append(self.books.admit(next(self.ids)))
        while self.queue and len(self.started) < self.slots:
            group = self.queue.pop(0)
            self.books.start(group)
            self.started[group] = self.published
        if not self.started:
            return False
        group = self.dice.choice(list(self.started))
        if self.dice.random() < self.failed:
            self.books.drop(group)
            self.forget(group)
            return True
        # A request that was sent again has its first token from newer weights than it began with.
        made_by = self.started.pop(group)
        self.oldest[group] = self.dice.choice([made_by, made_by, self.published])
        fresh = self.books.finish(group, self.oldest[group])
        if not fresh:
            raise Broken(f"{group.group_id} came too late for every batch")
        if self.dice.random() < self.filtered:
            self.books.drop(group)
        return True

    def forget(self, group: Group) -> None:
        self.started.pop(group, None)
        if group in self.queue:
            self.queue.remove(group)

    def resume(self, steps: int, step: int) -> int:
        """A new attempt from the checkpoint at `step`: what was finished and is not trained by then comes back."""
        self.dropped = 0
        batches, self.taken = self.taken[step:], self.taken[:step]
        back = [g for batch in batches for g in batch] + [*self.books.ledger.groups(GroupState.FINISHED)]
        self.begin(steps, step)
        self.started.clear()
        self.queue.clear()
        for former in sorted(back, key=lambda group: group.issue.ordinal):
            oldest = self.oldest.pop(former)
            if oldest <= step:
                group = self.books.admit(former.issue.ordinal)
                self.books.start(group)
                self.oldest[group] = oldest
                assert self.books.finish(group, oldest)
        return step


@st.composite
def jobs(draw: st.DrawFn, rule: type[Admission] = Admission) -> Job:
    interval = draw(st.integers(1, 3))
    limits = Limits(
        batch=draw(st.integers(1, 6)),
        staleness=draw(st.integers(interval - 1, interval + 3)),
        oversample=draw(st.sampled_from([0, 0, 1, 5])),
        straggler=draw(st.sampled_from(["wait", "reissue"])),
    )
    chances = st.sampled_from([0.0, 0.1, 0.6])
    return Job(
        limits,
        interval,
        random.Random(draw(st.integers(0, 1 << 32))),
        rule,
        slots=draw(st.sampled_from([1, 3, 8, 1000])),
        filtered=draw(chances),
        failed=draw(st.sampled_from([0.0, 0.1])),
        crashed=draw(st.sampled_from([0.0, 0.0, 0.2])),
    )


@settings(max_examples=300)
@given(job=jobs())
def test_nothing_is_trained_too_old_and_nothing_stands_still(job: Job) -> None:
    job.run(40)
    assert len({g for batch in job.taken for g in batch}) == 40 * job.limits.batch
    if not job.limits.oversample and job.limits.straggler == "wait":
        assert job.dropped == 0


class WithoutLookAhead(Admission):
    """Earliest deadline first, which looks only at the step in progress."""

    def _over(self) -> Iterator[tuple[int, int]]:
        return ((k, excess) for k, excess in super()._over() if k <= self.step)


class Eager(Admission):
    """Admits one batch too many."""

    @property
    def room(self) -> int:
        limit = (self._published or 0) + self._limits.staleness + 2
        return max(0, (limit - self.step) * self._limits.batch - self.live)


@pytest.mark.parametrize("rule", [WithoutLookAhead, Eager])
def test_a_rule_without_look_ahead_or_limit_is_caught(rule: type[Admission]) -> None:
    def holds(seed: int) -> bool:
        job = Job(Limits(batch=3, staleness=2), 1, random.Random(seed), rule, slots=1000)
        try:
            job.run(40)
        except Broken:
            return False
        return job.dropped == 0

    assert not all(holds(seed) for seed in range(50))


def filled(
    limits: Limits, *, horizon: int = 100, published: int | None = 0, rule: type[Admission] = Admission
) -> tuple[Rule, list[Group]]:
    """As many groups are admitted as may be."""
    books = Rule(limits, rule, published=published)
    books.admission.extend(horizon)
    return books, [books.admit(number) for number in range(books.admission.room)]


@pytest.mark.parametrize(
    ("staleness", "oversample", "horizon", "expected"),
    [(0, 0, 100, 4), (1, 0, 100, 8), (3, 2, 100, 18), (3, 0, 1, 4), (3, 2, 2, 10), (3, 2, 0, 0)],
)
def test_as_many_groups_are_live_as_may_be_trained_in_time(
    staleness: int, oversample: int, horizon: int, expected: int
) -> None:
    books, groups = filled(Limits(4, staleness, oversample), horizon=horizon)
    assert books.admission.live == len(groups) == expected and books.admission.room == 0


def test_nothing_is_admitted_before_the_first_step_is_known() -> None:
    admission = Admission(Limits(4, 3, 2), Ledger(lambda event: None))
    admission.publish(5)
    assert admission.room == 0


@pytest.mark.parametrize("rule", [Admission, WithoutLookAhead])
def test_the_example_of_the_modules_docstring_is_true(rule: type[Admission]) -> None:
    books, (a, b, c, d, e, f) = filled(Limits(2, 2), rule=rule)
    for group in (a, b, c, d, e, f):
        books.start(group)
    books.finish(a, 0)
    books.finish(b, 0)
    assert books.decision() == ((0, 1), (), ())
    books.take(books.admission.next_batch())
    books.admission.publish(1)
    assert books.admission.room == 2
    g, h = books.admit(6), books.admit(7)
    books.finished(g, 1)
    books.finished(h, 1)
    if rule is WithoutLookAhead:
        assert books.decision() == ((6, 7), (), ())
        books.take(books.admission.next_batch())
        books.admission.publish(2)
        for group in (c, d, e, f):
            books.finish(group, 0)
        assert books.decision() == ((2, 3), (5, 4), ()), "e and f are lost"
        return
    assert books.decision() == Waiting(0, (c, d, e))
    books.finish(e, 0)
    assert books.decision() == Waiting(0, (c, d, f))
    books.finish(c, 0)
    assert books.decision() == ((2, 4), (), ())


def test_a_filtered_group_frees_its_place_at_once() -> None:
    books, (first, second) = filled(Limits(2, 0))
    books.finished(first)
    books.ledger.filter(first, "")
    assert books.admission.room == 1
    assert books.admission.next_batch() == Waiting(2, (second,))


def test_synchronous_batches_follow_the_order_of_admission_and_the_weights() -> None:
    books, (first, second) = filled(Limits(2, 0))
    books.finished(second)
    assert str(books.admission.next_batch()) == "1 more groups, the oldest: 00000000"
    books.finished(first)
    assert books.decision() == ((0, 1), (), ())
    books.take(books.admission.next_batch())
    assert books.admission.room == 0
    assert "step 1 - 0 = 1 or newer, and those of step 0" in str(books.admission.impossible())
    books.admission.publish(1)
    assert books.admission.room == 2 and books.admission.impossible() is None


def test_a_group_that_has_not_begun_keeps_its_time() -> None:
    books, (first, _) = filled(Limits(1, 1))
    books.finished(first)
    books.take(books.admission.next_batch())
    books.admission.publish(1)
    assert books.admission.room == 1
    books.finished(books.admit(2), 1)
    assert books.decision() == ((2,), (), ()), "1 begins with the weights of step 1, so step 2 may train it"


@pytest.mark.parametrize("straggler", ["wait", "reissue"])
def test_a_straggler_at_its_deadline_is_waited_for_or_issued_again(straggler: str) -> None:
    books, (slow, second) = filled(Limits(1, 1, straggler=straggler))  # type: ignore[arg-type]
    books.start(slow)
    books.finished(second)
    books.take(books.admission.next_batch())
    books.admission.publish(1)
    books.finished(books.admit(2), 1)
    decision = books.admission.next_batch()
    if straggler == "wait":
        assert decision == Waiting(0, (slow,)) and str(decision) == "00000000: to be trained now or never"
    else:
        assert books.decision() == ((2,), (), (0,))
        books.take(decision)
        assert books.admission.live == 0 and books.admission.room == 1


def test_surplus_is_dropped_where_it_would_be_stale_and_kept_where_not() -> None:
    for staleness, surplus in [(0, {2, 3}), (1, set())]:
        books, groups = filled(Limits(2, staleness, oversample=2))
        for number in (0, 1, 3):
            books.finished(groups[number])
        decision = books.admission.next_batch()
        assert isinstance(decision, Batch)
        assert numbers(decision.groups) == (0, 1) and set(numbers(decision.surplus)) == surplus


def test_restored_groups_have_a_place_where_some_batch_has_room_for_them_in_time() -> None:
    admission = Rule(Limits(2, 3, oversample=1), first=5).admission
    assert [admission.restored_deadline(oldest) for oldest in (2, 4)] == [5, 7]
    assert admission.with_place([6, 5, 4, 5, 5, 5, 6, 6]) == {0, 1, 3, 4, 6}, (
        "two for each step and one more; 4 is over"
    )
    assert admission.with_place([admission.restored_deadline(None)] * 99) == set(range(99))


def test_weights_without_a_version_never_age() -> None:
    books, _ = filled(Limits(2, 0), published=None)
    for step in range(3):
        for number in range(books.admission.room):
            books.admit(10 * (step + 1) + number)
        for group in tuple(books.ledger.groups(GroupState.ADMITTED)):
            books.finished(group, None)
        decision = books.admission.next_batch()
        assert isinstance(decision, Batch) and len(decision.groups) == 2 and books.admission.impossible() is None
        books.take(decision)


def test_thousands_of_live_groups_cost_microseconds_each() -> None:
    books, live = filled(Limits(1024, 3))
    admission, steps = books.admission, 8
    assert len(live) == 4096
    began, number = time.process_time(), len(live)
    for step in range(steps):
        for group in live:
            books.start(group)
            books.finish(group, step)
            admission.next_batch() if len(books.ledger.groups(GroupState.FINISHED)) < 1024 else None
        decision = admission.next_batch()
        books.take(decision)
        admission.publish(step + 1)
        live = [books.admit(number + i) for i in range(admission.room)]
        number += len(live)
    assert (time.process_time() - began) / number < 200e-6


def test_neither_the_rule_nor_the_ledger_remembers_what_is_over() -> None:
    books, live = filled(Limits(4, 1), horizon=1000)
    sizes = []
    for step in range(200):
        for group in live:
            books.finished(group, step)
        batch = books.admission.next_batch()
        books.take(batch)
        assert isinstance(batch, Batch)
        books.ledger.train(step, batch.groups)
        books.admission.publish(step + 1)
        live = [books.admit(10_000 * (step + 1) + i) for i in range(books.admission.room)]
        ledger = books.ledger
        sizes.append(sum(map(len, (*ledger._live.values(), *ledger._due.values()))))
    assert max(sizes[1:]) == sizes[1]
