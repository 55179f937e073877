"""The pure policies of the fleet: when to start again, when to call a process hung."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.inference.engines.health import Suspicion
from asyncrl.inference.engines.restarts import LONGEST_DELAY_S, RestartHistory, RestartPolicy


def test_the_first_restart_is_at_once_and_pauses_double_up_to_a_bound() -> None:
    policy, history, delays = RestartPolicy(limit=12, window_s=1e6), RestartHistory(), []
    for _ in range(12):
        history, delay_s = policy.after_end(history, now=0.0)
        delays.append(delay_s)
    assert delays[:5] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert max(delay for delay in delays if delay is not None) == LONGEST_DELAY_S
    assert policy.after_end(history, now=0.0)[1] is None


def test_restarts_outside_of_the_window_are_forgiven() -> None:
    policy = RestartPolicy(limit=1, window_s=10.0)
    history, first = policy.after_end(RestartHistory(), now=0.0)
    assert first == 0.0
    assert policy.after_end(history, now=9.0)[1] is None
    assert policy.after_end(history, now=11.0)[1] == 0.0


def test_without_restarts_the_first_end_is_final() -> None:
    assert RestartPolicy(limit=0, window_s=10.0).after_end(RestartHistory(), now=0.0)[1] is None


@given(ends=st.lists(st.floats(0, 100), max_size=60), limit=st.integers(0, 5), window_s=st.floats(1, 50))
def test_no_window_ever_holds_more_restarts_than_the_limit(ends: list[float], limit: int, window_s: float) -> None:
    policy, history, now, restarts = RestartPolicy(limit, window_s), RestartHistory(), 0.0, []
    for gap in ends:
        now += gap
        history, delay_s = policy.after_end(history, now)
        if delay_s is not None:
            now += delay_s
            restarts.append(now)
    for at in restarts:
        assert sum(at <= other < at + window_s for other in restarts) <= limit


def test_failures_in_a_row_add_up_and_an_answer_clears_them() -> None:
    record = Suspicion()
    for expected in (1, 2, 3):
        record = record.after("a", "a", "silence")
        assert (record.failures, record.reason) == (expected, "silence")
    assert record.after("a", "a", None).failures == 0


def test_a_probe_that_ran_into_a_change_says_nothing() -> None:
    record = Suspicion("a", 2, "silence")
    assert record.after("a", "b", "silence").failures == 0
    assert record.after("a", None, "silence").failures == 0
    assert record.after("b", "b", "silence").failures == 1  # the failures before were another's
