"""Deadlines by a clock that stands still while engines are paused: the arithmetic, and the waits that go by it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.observability.waits import WAITS
from asyncrl.observability.watchdog import OverdueWaits
from asyncrl.rollout.requests import engine_clock
from asyncrl.rollout.requests.engine_clock import EngineClock, PauseClock

STEPS = st.lists(st.tuples(st.floats(0, 1e4), st.sampled_from(["pause", "resume", "look"])), max_size=30)


@given(start=st.floats(0, 1e6), steps=STEPS)
def test_the_clock_shows_the_time_without_the_pauses(start: float, steps: list[tuple[float, str]]) -> None:
    clock, now, shown, paused = PauseClock(), start, 0.0, False
    for seconds, step in steps:
        now += seconds
        shown += 0.0 if paused else seconds
        assert clock.time(now) - start == pytest.approx(shown, abs=1e-6)
        if step != "look":
            before = clock.time(now)
            clock = clock.pause(now) if step == "pause" else clock.resume(now)
            paused = step == "pause"
            assert clock.time(now) == pytest.approx(before, abs=1e-6), "it never jumps"


@given(start=st.floats(0, 1e6), timeout_s=st.floats(0.01, 1e4), steps=STEPS)
def test_a_deadline_comes_after_its_time_of_running_engines_and_never_in_a_pause(
    start: float, timeout_s: float, steps: list[tuple[float, str]]
) -> None:
    clock, now, ran, paused = PauseClock(), start, 0.0, False
    end = clock.time(now) + timeout_s
    for seconds, step in steps:
        due = clock.when(end)
        assert math.isinf(due) == paused
        if now + seconds >= due:
            assert ran + due - now == pytest.approx(timeout_s, abs=1e-6)
            return
        now += seconds
        ran += 0.0 if paused else seconds
        if step != "look":
            clock = clock.pause(now) if step == "pause" else clock.resume(now)
            paused = step == "pause"
    assert ran <= timeout_s + 1e-6, "it came too late"


@given(now=st.floats(0, 1e6), more=st.lists(st.floats(0, 100), min_size=1, max_size=5))
def test_a_pause_within_a_pause_is_the_same_pause(now: float, more: list[float]) -> None:
    once = twice = PauseClock().pause(now)
    for seconds in more:
        twice = twice.pause(now + seconds)
    assert once == twice
    after = once.resume(now + 200)
    assert after.resume(now + 300) == after


@dataclass
class Time:
    """The time as clocks and waits see it; it passes when a test says so."""

    now: float

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time_that_is_told(monkeypatch: pytest.MonkeyPatch) -> Time:
    told = Time(time.monotonic())
    monkeypatch.setattr(engine_clock, "time", told)
    return told


async def test_a_pause_that_is_longer_than_the_deadline_ends_no_wait() -> None:
    clock, answered = EngineClock(), anyio.Event()

    async def ask() -> None:
        with clock.waiting("response", "r", 0.2):
            clock.pause()
            await answered.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        clock.pause()
        paused_at = time.monotonic()
        await anyio.sleep(0.4)  # the pause that is meant
        assert [(wait.what, wait.subject) for wait in WAITS.snapshot()] == [
            ("response", "r"),
            ("end of the pause", "engines"),
        ]
        paused_s = time.monotonic() - paused_at
        clock.resume()
        answered.set()
    assert clock.pauses == 1 and clock.stood_still_s >= paused_s
    assert WAITS.snapshot() == ()


async def test_in_a_pause_the_pause_is_reported_and_no_wait_that_stands_still_not_even_afterwards(
    time_that_is_told: Time,
) -> None:
    clock, policy = EngineClock(expected_pause_s=400.0), OverdueWaits(min_age_s=0.0)

    def reported() -> list[str]:
        return [wait.what for wait in policy.newly_overdue(WAITS.snapshot(), time_that_is_told.now)]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clock.sleep, 400.0, "next attempt", "r")
        await anyio.wait_all_tasks_blocked()
        clock.pause()
        time_that_is_told.now += 500.0
        assert reported() == ["end of the pause"]
        clock.resume()
        assert reported() == []
        time_that_is_told.now += 250.0
        assert reported() == ["next attempt"], "it used up half of its time since"
        clock.pause()
        clock.resume()
        assert reported() == [], "once"
        tasks.cancel_scope.cancel()


async def test_after_a_pause_a_wait_has_what_was_left_of_its_time() -> None:
    clock, began = EngineClock(), time.monotonic()
    async with anyio.create_task_group() as tasks:

        async def interrupt() -> None:
            clock.pause()
            await anyio.sleep(0.3)
            clock.resume()

        tasks.start_soon(interrupt)
        with (
            pytest.raises(TimeoutError, match=r"no response from r after 0\.1 s"),
            clock.waiting("response", "r", 0.1),
        ):
            await anyio.sleep_forever()
    assert time.monotonic() - began >= 0.1 + clock.stood_still_s
    assert WAITS.snapshot() == ()


async def test_a_wait_that_begins_in_a_pause_has_all_of_its_time_after_it() -> None:
    clock, slept = EngineClock(), anyio.Event()
    clock.pause()

    async def sleep() -> None:
        await clock.sleep(0.01, "next attempt", "r")
        slept.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sleep)
        await anyio.sleep(0.05)
        assert not slept.is_set()
        clock.resume()
    assert slept.is_set()


async def test_who_waits_for_the_end_of_a_pause_is_told() -> None:
    clock = EngineClock()
    await clock.running()
    clock.pause()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clock.running)
        await anyio.wait_all_tasks_blocked()
        clock.resume()
