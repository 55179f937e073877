from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollout.requests.retry import (
    MOST_ATTEMPTS,
    WAITED_OUT,
    RequestFault,
    RetryHistory,
    RetryPolicy,
    parse_retry_after,
)

NOW = datetime(2026, 11, 29, 23, 0, tzinfo=UTC)

COUNTED = [k for k in RequestFault if k not in (RequestFault.BUSY, RequestFault.UNREACHABLE, RequestFault.REFUSED)]


def test_a_refused_request_is_never_sent_again() -> None:
    assert RetryPolicy(retries=9, patience_s=9).after(RetryHistory(), RequestFault.REFUSED, 0.5)[1] is None


@given(kinds=st.lists(st.sampled_from(COUNTED), min_size=10, max_size=10), retries=st.integers(0, 8))
def test_counted_failures_are_retried_as_often_as_configured(kinds: list[RequestFault], retries: int) -> None:
    policy, history = RetryPolicy(retries=retries, patience_s=1), RetryHistory()
    decisions = []
    for kind in kinds:
        history, delay = policy.after(history, kind, 0.5)
        decisions.append(delay is not None)
    assert decisions == [True] * retries + [False] * (10 - retries)


def test_aborts_by_updates_of_the_weights_cost_no_attempt() -> None:
    policy = RetryPolicy(retries=0, patience_s=60, waited_out=WAITED_OUT | {RequestFault.ABORTED})
    history, delay = policy.after(RetryHistory(), RequestFault.ABORTED, 0.5)
    assert delay is not None and history.failures == 0
    assert policy.after(history, RequestFault.SERVER_ERROR, 0.5)[1] is None


@given(
    kinds=st.lists(st.sampled_from(sorted(set(RequestFault) - {RequestFault.REFUSED}))),
    retries=st.integers(0, 5),
    patience_s=st.floats(0, 100),
    jitter=st.floats(0, 1, exclude_max=True),
    retry_after_s=st.none() | st.floats(0, 1e5),
)
def test_pauses_are_bounded_and_never_cost_an_attempt(
    kinds: list[RequestFault], retries: int, patience_s: float, jitter: float, retry_after_s: float | None
) -> None:
    policy, history = RetryPolicy(retries=retries, patience_s=patience_s), RetryHistory()
    for kind in kinds:
        before = history
        history, delay = policy.after(history, kind, jitter, retry_after_s)
        assert delay is None or 0 < delay < 1.5 * policy.longest_delay_s + (retry_after_s or 0.0)
        assert history.paused_s <= patience_s + 1e-9
        if kind in (RequestFault.BUSY, RequestFault.UNREACHABLE):
            assert history.failures == before.failures
        if delay is None:
            return


def test_a_busy_fleet_is_waited_for_as_long_as_patience_lasts() -> None:
    policy, history, total = RetryPolicy(retries=0, patience_s=60), RetryHistory(), 0.0
    while True:
        history, delay = policy.after(history, RequestFault.BUSY, 0.5)
        if delay is None:
            break
        total += delay
    assert 50 < total <= 60


# Retry-After


@given(asked_s=st.floats(0, 100), waited_s=st.floats(0, 100), jitter=st.floats(0, 1, exclude_max=True))
def test_nothing_is_sent_before_the_time_that_the_answer_names(asked_s: float, waited_s: float, jitter: float) -> None:
    policy, history = RetryPolicy(retries=0, patience_s=300), RetryHistory(paused_s=waited_s)
    _, delay = policy.after(history, RequestFault.BUSY, jitter, asked_s)
    assert delay is not None and asked_s < delay <= asked_s + 1.5 * policy.first_delay_s


def test_a_time_beyond_all_patience_is_cut_to_what_is_left_of_it() -> None:
    policy = RetryPolicy(retries=0, patience_s=60)
    history, delay = policy.after(RetryHistory(paused_s=20), RequestFault.BUSY, 0.5, 3600)
    assert delay == pytest.approx(40) and history.paused_s == pytest.approx(60)
    assert policy.after(history, RequestFault.BUSY, 0.5, 3600)[1] is None


@pytest.mark.parametrize("kind", COUNTED)
def test_it_says_nothing_about_failures_of_another_kind(kind: RequestFault) -> None:
    policy = RetryPolicy(retries=3, patience_s=60)
    assert policy.after(RetryHistory(), kind, 0.5, 50) == policy.after(RetryHistory(), kind, 0.5)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("", None),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("-5", 0.0),
        ("0", 0.0),
        ("1.5", 1.5),
        ("120", 120.0),
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90.0),
        (format_datetime(NOW - timedelta(seconds=90), usegmt=True), 0.0),
    ],
)
def test_retry_after_is_read_in_seconds_and_as_a_date(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header, NOW) == seconds


@given(st.text())
def test_no_header_breaks_it(header: str) -> None:
    seconds = parse_retry_after(header, NOW)
    assert seconds is None or (seconds >= 0 and math.isfinite(seconds))


def test_attempts_end_where_their_numbers_would_get_wider() -> None:
    policy, history, attempts = RetryPolicy(retries=0, patience_s=1e9, longest_delay_s=0.1), RetryHistory(), 1
    while policy.after(history, RequestFault.BUSY, 0.5)[1] is not None:
        history, attempts = policy.after(history, RequestFault.BUSY, 0.5)[0], attempts + 1
    assert attempts == MOST_ATTEMPTS
