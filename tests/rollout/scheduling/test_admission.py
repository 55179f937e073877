from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollout.scheduling.admission import Admission, Batch, Limits, Waiting


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
    started: dict[str, int] = field(default_factory=dict)
    """Running groups: the step published when they began."""
    queue: list[str] = field(default_factory=list)
    oldest: dict[str, int] = field(default_factory=dict)
    """Finished groups: the step of their oldest token."""
    taken: list[tuple[str, ...]] = field(default_factory=list)
    dropped: int = 0

    def run(self, steps: int) -> None:
        self.admission = self.rule(self.limits)
        self.admission.extend(steps)
        self.published = 0
        self.admission.publish(0)
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

    def take(self, step: int) -> tuple[str, ...]:
        for _ in range(10_000):
            match self.admission.next_batch():
                case Batch() as batch:
                    self.check(batch, step)
                    self.admission.take(batch)
                    for group_id in (*batch.surplus, *batch.reissue):
                        self.forget(group_id)
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
        for group_id in batch.groups:
            if step - self.oldest[group_id] > self.limits.staleness:
                raise Broken(f"{group_id}: weights of step {self.oldest[group_id]} at step {step}")
        if len(batch.surplus) > self.limits.oversample:
            raise Broken(f"{len(batch.surplus)} dropped, {self.limits.oversample} allowed")
        if batch.reissue:
            assert self.limits.straggler == "reissue" and not set(batch.reissue) & set(self.oldest)
        self.dropped += len(batch.surplus) + len(batch.reissue)

    def event(self) -> bool:
        """Something happens; False when nothing can."""
        while self.admission.room:
            group_id = f"{next(self.ids):08d}"
            self.admission.admit(group_id)
            self.queue.append(group_id)
        while self.queue and len(self.started) < self.slots:
            group_id = self.queue.pop(0)
            self.admission.start(group_id)
            self.started[group_id] = self.published
        if not self.started:
            return False
        group_id = self.dice.choice(list(self.started))
        if self.dice.random() < self.failed:
            self.admission.remove(group_id)
            self.forget(group_id)
            return True
        # A request that was sent again has its first token from newer weights than it began with.
        made_by = self.started.pop(group_id)
        self.oldest[group_id] = self.dice.choice([made_by, made_by, self.published])
        fresh = self.admission.finish(group_id, self.oldest[group_id])
        if not fresh:
            raise Broken(f"{group_id} came too late for every batch")
        if self.dice.random() < self.filtered:
            self.admission.remove(group_id)
        return True

    def forget(self, group_id: str) -> None:
        self.started.pop(group_id, None)
        if group_id in self.queue:
            self.queue.remove(group_id)

    def resume(self, steps: int, step: int) -> int:
        """A new attempt from the checkpoint at `step`: what was finished and is not trained by then comes back."""
        self.dropped = 0
        batches, self.taken = self.taken[step:], self.taken[:step]
        back = [g for batch in batches for g in batch] + [*self.admission._done]
        self.admission = self.rule(self.limits, first=step)
        self.admission.extend(steps)
        self.admission.publish(step)
        self.published = step
        self.started.clear()
        self.queue.clear()
        for group_id in sorted(back):
            if self.oldest[group_id] <= step:
                self.admission.admit(group_id)
                self.admission.start(group_id)
                assert self.admission.finish(group_id, self.oldest[group_id])
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


def finished(admission: Admission, group_id: str, oldest: int | None = 0) -> None:
    admission.start(group_id)
    admission.finish(group_id, oldest)


def filled(limits: Limits, *, horizon: int = 100, published: int | None = 0) -> Admission:
    admission = Admission(limits)
    admission.extend(horizon)
    if published is not None:
        admission.publish(published)
    for number in range(admission.room):
        admission.admit(str(number))
    return admission


@pytest.mark.parametrize(
    ("staleness", "oversample", "horizon", "expected"),
    [(0, 0, 100, 4), (1, 0, 100, 8), (3, 2, 100, 18), (3, 0, 1, 4), (3, 2, 2, 10), (3, 2, 0, 0)],
)
def test_as_many_groups_are_live_as_may_be_trained_in_time(
    staleness: int, oversample: int, horizon: int, expected: int
) -> None:
    admission = filled(Limits(4, staleness, oversample), horizon=horizon)
    assert admission.live == expected and admission.room == 0


def test_a_filtered_group_frees_its_place_at_once() -> None:
    admission = filled(Limits(2, 0))
    admission.start("0")
    admission.finish("0", 0)
    admission.remove("0")
    assert admission.room == 1
    assert admission.next_batch() == Waiting(2, ("1",))


def test_synchronous_batches_follow_the_order_of_admission_and_the_weights() -> None:
    admission = filled(Limits(2, 0))
    finished(admission, "1")
    assert str(admission.next_batch()) == "1 more groups, the oldest: 0"
    finished(admission, "0")
    batch = admission.next_batch()
    assert batch == Batch(("0", "1"))
    admission.take(batch)
    assert admission.room == 0 and "step 1 - 0 = 1 or newer, and those of step 0" in str(admission.impossible())
    admission.publish(1)
    assert admission.room == 2 and admission.impossible() is None


def test_a_group_that_has_not_begun_keeps_its_time() -> None:
    admission = filled(Limits(1, 1))  # groups 0 and 1
    finished(admission, "0")
    admission.take(admission.next_batch())  # type: ignore[arg-type]
    admission.publish(1)
    assert admission.room == 1
    admission.admit("2")
    finished(admission, "2", 1)
    assert admission.next_batch() == Batch(("2",)), "1 begins with the weights of step 1, so step 2 may train it"


@pytest.mark.parametrize("straggler", ["wait", "reissue"])
def test_a_straggler_at_its_deadline_is_waited_for_or_issued_again(straggler: str) -> None:
    admission = filled(Limits(1, 1, straggler=straggler))  # type: ignore[arg-type]
    admission.start("0")
    finished(admission, "1")
    admission.take(admission.next_batch())  # type: ignore[arg-type]
    admission.publish(1)
    admission.admit("2")
    finished(admission, "2", 1)
    decision = admission.next_batch()
    if straggler == "wait":
        assert decision == Waiting(0, ("0",)) and str(decision) == "0: to be trained now or never"
    else:
        assert decision == Batch(("2",), reissue=("0",))
        admission.take(decision)
        assert admission.live == 0 and admission.room == 1


def test_surplus_is_dropped_where_it_would_be_stale_and_kept_where_not() -> None:
    for staleness, surplus in [(0, ("2", "3")), (1, ())]:
        admission = filled(Limits(2, staleness, oversample=2))
        for group_id in ("0", "1", "3"):
            finished(admission, group_id)
        decision = admission.next_batch()
        assert isinstance(decision, Batch)
        assert decision.groups == ("0", "1") and set(decision.surplus) == set(surplus)


def test_weights_without_a_version_never_age() -> None:
    admission = filled(Limits(2, 0), published=None)
    for step in range(3):
        for number in range(admission.room):
            admission.admit(f"{step}.{number}")
        for group_id in list(admission._open):
            finished(admission, group_id, None)
        decision = admission.next_batch()
        assert isinstance(decision, Batch) and len(decision.groups) == 2 and admission.impossible() is None
        admission.take(decision)


def test_thousands_of_live_groups_cost_microseconds_each() -> None:
    admission = filled(Limits(1024, 3))
    live, steps = [str(number) for number in range(admission.live)], 8
    assert len(live) == 4096
    began, number = time.process_time(), len(live)
    for step in range(steps):
        for group_id in live:
            admission.start(group_id)
            admission.finish(group_id, step)
            admission.next_batch() if admission.finished < 1024 else None
        decision = admission.next_batch()
        assert isinstance(decision, Batch)
        admission.take(decision)
        admission.publish(step + 1)
        live = [str(number + i) for i in range(admission.room)]
        number += len(live)
        for group_id in live:
            admission.admit(group_id)
    assert (time.process_time() - began) / number < 200e-6
