"""Which checkpoints go when a new one is there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.training.checkpoints.retention import to_remove


def test_the_newest_stay_and_all_older_go() -> None:
    assert to_remove([1, 2, 3, 4], keep_last=2, keep_every=0) == (1, 2)
    assert to_remove([1, 2], keep_last=2, keep_every=0) == ()
    assert to_remove([], keep_last=1, keep_every=0) == ()


def test_every_nth_step_stays_for_good() -> None:
    assert to_remove([5, 10, 15, 20, 25, 30], keep_last=1, keep_every=10) == (5, 15, 25)


def test_what_was_written_last_counts_as_newest_after_a_set_back() -> None:
    assert to_remove([30, 40, 50, 35], keep_last=2, keep_every=0) == (30, 40)


@given(st.lists(st.integers(1, 1000), unique=True), st.integers(1, 10), st.integers(0, 10))
def test_one_after_the_other_leaves_what_all_at_once_leaves(steps: list[int], keep_last: int, keep_every: int) -> None:
    kept: list[int] = []
    for step in steps:
        kept.append(step)
        gone = to_remove(kept, keep_last=keep_last, keep_every=keep_every)
        kept = [s for s in kept if s not in gone]
        assert kept[-1] == step
    gone = to_remove(steps, keep_last=keep_last, keep_every=keep_every)
    assert kept == [s for s in steps if s not in gone]
    assert len(kept) >= min(keep_last, len(steps))
