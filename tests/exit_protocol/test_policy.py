"""The decisions of each kind of rank; tests pass the time in."""

from __future__ import annotations

import signal

import pytest

from asyncrl.exit_protocol.policy import (
    GONE_GRACE_S,
    RANK_MARGIN_S,
    REPEAT_S,
    UNSIGNALLED_GRACES,
    Order,
    RankPolicy,
    RankZeroPolicy,
)

INT, TERM, HUP, USR1, USR2 = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2


@pytest.mark.parametrize("signum", [INT, TERM, HUP])
def test_the_first_signal_stops_rank_zero_within_its_grace(signum: signal.Signals) -> None:
    policy = RankZeroPolicy(12.0)
    assert policy.on_signal(signum, 100.0) is Order.STOP_NOW
    assert (policy.stopped_by, policy.exit_code, policy.leave_by) == (signum, 128 + signum, 112.0)


def test_an_echo_is_no_second_signal() -> None:
    policy = RankZeroPolicy(12.0)
    policy.on_signal(TERM, 100.0)
    assert policy.on_signal(TERM, 100.0 + REPEAT_S / 2) is None
    assert policy.on_signal(INT, 100.0 + REPEAT_S) is Order.LEAVE
    assert policy.exit_code == 128 + TERM  # of the first signal


def test_a_graceful_stop_only_asks() -> None:
    policy = RankZeroPolicy(12.0)
    assert policy.on_signal(USR1, 0.0) is Order.FINISH
    assert policy.answer == "asked to stop: the step in progress is the last"
    assert policy.on_signal(USR1, 0.0) is None  # one answer is enough
    assert policy.stop.requested
    assert (policy.stopped_by, policy.leave_by) == (None, None)
    assert policy.on_signal(TERM, 0.1) is Order.STOP_NOW  # SIGUSR1 does not count as a first signal
    assert policy.answer.startswith("SIGTERM: stopping, within ") and "a second signal leaves by force" in policy.answer
    assert policy.on_signal(USR1, 0.2) is None  # too late


def rank_policy() -> RankPolicy:
    """Policy of a rank >= 1 that has seen rank 0."""
    policy = RankPolicy(12.0, watches_rank_zero=True)
    policy.on_rank_zero_seen()
    return policy


def test_other_signals_are_none_of_its_business() -> None:
    for policy in (RankZeroPolicy(12.0), rank_policy()):
        assert policy.on_signal(USR2, 0.0) is None
        assert policy.on_signal(0, 0.0) is None
        assert policy.leave_by is None


def test_an_expected_end_is_bounded_and_keeps_its_code() -> None:
    policy = RankZeroPolicy(12.0)
    policy.expect_exit(3, 10.0)
    assert (policy.exit_code, policy.leave_by) == (3, 10.0 + UNSIGNALLED_GRACES * 12.0)
    policy.expect_exit(4, 30.0, "the disk is full")  # the next stage has its own deadline
    assert (policy.exit_code, policy.leave_by) == (4, 30.0 + UNSIGNALLED_GRACES * 12.0)
    assert policy.reason == "shutdown took longer than 60 s after: the disk is full"
    assert policy.on_signal(TERM, 31.0) is Order.STOP_NOW
    assert policy.leave_by == 43.0
    policy = RankZeroPolicy(12.0)
    policy.on_signal(HUP, 10.0)
    policy.expect_exit(0, 15.0)
    assert (policy.exit_code, policy.leave_by) == (128 + HUP, 22.0)  # no second grace


def test_other_ranks_leave_the_stop_to_rank_zero() -> None:
    policy = rank_policy()
    for now in (0.0, 1.0, 2.0):
        assert policy.on_signal(TERM, now) is None
    assert policy.leave_by == 12.0 + RANK_MARGIN_S
    assert policy.exit_code == 128 + TERM


def test_other_ranks_follow_rank_zero_into_the_grave() -> None:
    policy = rank_policy()
    policy.on_rank_zero_gone(5.0)
    assert (policy.leave_by, policy.exit_code) == (5.0 + GONE_GRACE_S, 1)
    policy.on_signal(TERM, 5.1)  # from the agent, which has also noticed
    assert policy.leave_by == 5.0 + GONE_GRACE_S


def test_a_rank_that_has_done_its_work_may_outlast_rank_zero_a_little() -> None:
    policy = rank_policy()
    policy.on_rank_zero_gone(1.0)
    policy.expect_exit(0, 2.0)
    assert (policy.leave_by, policy.exit_code) == (14.0, 0)
    policy.on_rank_zero_gone(3.0)
    policy.on_signal(TERM, 3.0)
    assert (policy.leave_by, policy.exit_code) == (14.0, 0)


def test_a_signal_before_rank_zero_has_shown_itself_means_that_it_never_will() -> None:
    policy = RankPolicy(12.0, watches_rank_zero=True)
    policy.on_signal(TERM, 1.0)
    assert policy.leave_by == 1.0 + GONE_GRACE_S
    elsewhere = RankPolicy(12.0, watches_rank_zero=False)  # a rank on another node never sees rank 0
    elsewhere.on_signal(TERM, 1.0)
    assert elsewhere.leave_by == 13.0 + RANK_MARGIN_S
