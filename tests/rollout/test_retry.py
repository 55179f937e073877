from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollout.retry import WAITED_OUT, FailureKind, RetryHistory, RetryPolicy

COUNTED = [k for k in FailureKind if k not in (FailureKind.BUSY, FailureKind.UNREACHABLE, FailureKind.REFUSED)]


def test_a_refused_request_is_never_sent_again() -> None:
    assert RetryPolicy(retries=9, patience_s=9).after(RetryHistory(), FailureKind.REFUSED, 0.5)[1] is None


@given(kinds=st.lists(st.sampled_from(COUNTED), min_size=10, max_size=10), retries=st.integers(0, 8))
def test_counted_failures_are_retried_as_often_as_configured(kinds: list[FailureKind], retries: int) -> None:
    policy, history = RetryPolicy(retries=retries, patience_s=1), RetryHistory()
    decisions = []
    for kind in kinds:
        history, delay = policy.after(history, kind, 0.5)
        decisions.append(delay is not None)
    assert decisions == [True] * retries + [False] * (10 - retries)


def test_aborts_by_updates_of_the_weights_cost_no_attempt() -> None:
    policy = RetryPolicy(retries=0, patience_s=60, waited_out=WAITED_OUT | {FailureKind.ABORTED})
    history, delay = policy.after(RetryHistory(), FailureKind.ABORTED, 0.5)
    assert delay is not None and history.failures == 0
    assert policy.after(history, FailureKind.SERVER_ERROR, 0.5)[1] is None


@given(
    kinds=st.lists(st.sampled_from(sorted(set(FailureKind) - {FailureKind.REFUSED}))),
    retries=st.integers(0, 5),
    patience_s=st.floats(0, 100),
    jitter=st.floats(0, 1, exclude_max=True),
)
def test_pauses_are_bounded_and_never_cost_an_attempt(
    kinds: list[FailureKind], retries: int, patience_s: float, jitter: float
) -> None:
    policy, history = RetryPolicy(retries=retries, patience_s=patience_s), RetryHistory()
    for kind in kinds:
        before = history
        history, delay = policy.after(history, kind, jitter)
        assert delay is None or 0 < delay < 1.5 * policy.longest_delay_s
        assert history.paused_s <= patience_s
        if kind in (FailureKind.BUSY, FailureKind.UNREACHABLE):
            assert history.failures == before.failures
        if delay is None:
            return


def test_a_busy_fleet_is_waited_for_as_long_as_patience_lasts() -> None:
    policy, history, total = RetryPolicy(retries=0, patience_s=60), RetryHistory(), 0.0
    while True:
        history, delay = policy.after(history, FailureKind.BUSY, 0.5)
        if delay is None:
            break
        total += delay
    assert 50 < total <= 60
