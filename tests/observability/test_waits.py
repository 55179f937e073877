from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

from asyncrl.observability.waits import WAITS, Wait, WaitRegistry, format_waits, waiting

pytestmark = pytest.mark.anyio


async def test_a_wait_is_registered_for_as_long_as_it_lasts() -> None:
    with waiting("checksum", "engine-0", 5.0):
        (wait,) = WAITS.snapshot()
        assert (wait.what, wait.subject, wait.deadline_s) == ("checksum", "engine-0", 5.0)
    assert WAITS.snapshot() == ()


async def test_a_wait_past_its_deadline_names_what_and_whom() -> None:
    message = r"no checksum from engine-0 after 0\.01 s"
    with pytest.raises(TimeoutError, match=message), waiting("checksum", "engine-0", 0.01):
        await anyio.sleep_forever()
    assert WAITS.snapshot() == ()


async def test_the_inner_of_two_waits_is_named() -> None:
    inner_first = waiting("answer", "engine-0", 5.0), waiting("header", "engine-1", 0.01)
    with pytest.raises(TimeoutError, match="no header from engine-1"), inner_first[0], inner_first[1]:
        await anyio.sleep_forever()


async def test_the_outer_deadline_is_named_when_it_is_the_one_that_passed() -> None:
    outer_first = waiting("answer", "engine-0", 0.01), waiting("header", "engine-1", 5.0)
    with pytest.raises(TimeoutError, match="no answer from engine-0"), outer_first[0], outer_first[1]:
        await anyio.sleep_forever()


async def test_a_timeout_of_the_body_is_not_taken_for_the_deadline() -> None:
    with pytest.raises(TimeoutError) as caught, waiting("answer", "engine-0", 600.0):
        raise TimeoutError
    assert "600" not in str(caught.value)


async def test_an_error_of_the_body_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), waiting("answer", "engine-0", 5.0):
        _ = 1 / 0
    assert WAITS.snapshot() == ()


async def test_cancellation_from_outside_is_no_timeout() -> None:
    with anyio.move_on_after(0.01) as scope:
        with waiting("answer", "engine-0", 5.0):
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert WAITS.snapshot() == ()


async def test_a_result_that_comes_before_the_deadline_is_kept_though_it_has_passed_since() -> None:
    with waiting("answer", "engine-0", 0.0):
        answer = 42
    assert answer == 42


def test_the_report_reads_like_a_sentence() -> None:
    waits = (Wait("first generation", "engine-0", 100.0, 600.0), Wait("end", "reward worker 1", 110.0, math.inf))
    assert format_waits(waits, now=112.34).splitlines() == [
        "driver waits for: first generation from engine-0, 12.3 s of 600 s",
        "driver waits for: end from reward worker 1, 2.3 s without a deadline",
    ]
    assert format_waits((), waiter="rank 1") == "rank 1 waits for nothing outside itself"


async def test_the_report_takes_the_waits_in_progress_by_default() -> None:
    with waiting("checksum", "engine-0", 5.0):
        assert re.fullmatch(r"driver waits for: checksum from engine-0, 0\.\d s of 5 s", format_waits())


def test_waits_that_somebody_else_keeps_are_told_among_the_others_oldest_first() -> None:
    class Table:
        def waits(self) -> list[Wait]:
            return [Wait("b", "y", since, 1.0) for since in (0.0, math.inf)]

    registry, table = WaitRegistry(), Table()
    with registry.register("a", "x", 1.0):
        registry.add(table)
        assert [wait.what for wait in registry.snapshot()] == ["b", "a", "b"]
        registry.remove(table)
        assert [wait.what for wait in registry.snapshot()] == ["a"]


def test_time_that_does_not_count_makes_no_wait_older() -> None:
    wait = Wait("response", "r", 100.0, 600.0, stood_still_s=250.0)
    assert wait.age_s(400.0) == 50.0
    assert wait == Wait("response", "r", 100.0, 600.0), "a pause must not make it another wait"


def test_many_threads_register_and_look_at_once() -> None:
    registry = WaitRegistry()

    def work(n: int) -> None:
        for _ in range(300):
            with registry.register("x", str(n), 1.0):
                assert str(n) in {wait.subject for wait in registry.snapshot()}

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert registry.snapshot() == ()
