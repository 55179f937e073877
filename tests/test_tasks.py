"""Waking waiters, results and errors of several tasks, and tasks with names."""

from __future__ import annotations

from functools import partial

import anyio
import anyio.lowlevel
import pytest

from asyncrl.tasks import Background, Changes, finish_all, first_of, run_all

pytestmark = pytest.mark.anyio


async def after(turns: int, result: object = None, error: Exception | None = None) -> object:
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()
    if error is not None:
        raise error
    return result


async def test_a_change_wakes_every_task_that_waits_and_no_later_one() -> None:
    changes, woken = Changes(), []

    async def wait(name: str) -> None:
        await changes.wait()
        woken.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, "a")
        tasks.start_soon(wait, "b")
        await anyio.wait_all_tasks_blocked()
        changes.notify()
        tasks.start_soon(wait, "late")
        await anyio.wait_all_tasks_blocked()
        assert sorted(woken) == ["a", "b"]
        tasks.cancel_scope.cancel()


async def test_a_wait_that_is_woken_in_every_turn_of_the_loop_can_be_cancelled() -> None:
    changes = Changes()

    async def wait_for_ever() -> None:
        while True:
            await changes.wait()

    async def notify_for_ever() -> None:
        while True:
            changes.notify()
            await anyio.lowlevel.checkpoint()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as notifying:
            notifying.start_soon(notify_for_ever)
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(wait_for_ever)
                await anyio.sleep(0.01)
                waiting.cancel_scope.cancel()
            notifying.cancel_scope.cancel()


async def test_results_come_in_the_order_of_the_calls() -> None:
    assert await run_all(partial(after, 3, "a"), partial(after, 1, "b")) == ["a", "b"]


async def test_the_first_error_cancels_the_others_and_is_raised_as_it_is() -> None:
    with pytest.raises(ValueError, match="first"):
        await run_all(anyio.sleep_forever, partial(after, 1, error=ValueError("first")))


async def test_every_call_is_finished_before_the_first_error_is_raised() -> None:
    done = []

    async def last() -> None:
        await after(5)
        done.append(True)

    with pytest.raises(ValueError, match="first"):
        await finish_all(partial(after, 1, error=ValueError("first")), partial(after, 2, error=KeyError()), last)
    assert done == [True]


async def test_the_first_wait_that_returns_cancels_the_others() -> None:
    with anyio.fail_after(5):
        await first_of(anyio.sleep_forever, partial(after, 2))
    with pytest.raises(ValueError, match="first"):
        await first_of(anyio.sleep_forever, partial(after, 1, error=ValueError("first")))


async def test_background_work_is_listed_from_its_start_to_its_end() -> None:
    async with anyio.create_task_group() as tasks:
        background, release = Background(tasks), anyio.Event()
        background.start("first", release.wait)
        second = background.start("second", anyio.sleep_forever)
        assert [task.name for task in background.running] == ["first", "second"]
        assert all(0 <= task.seconds < 60 for task in background.running)
        release.set()
        await anyio.wait_all_tasks_blocked()
        assert [task.name for task in background.running] == ["second"]
        await second.end()
        await second.end()
        assert background.running == ()


async def test_the_end_of_background_work_is_waited_for_also_where_that_takes_a_while() -> None:
    done: list[str] = []

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await after(20)
                done.append("handed back")

    async with anyio.create_task_group() as tasks:
        task = Background(tasks).start("work", work)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        await task.end()  # the job has failed, and everything is cancelled
        assert done == ["handed back"]


async def test_an_error_of_background_work_ends_the_job() -> None:
    with pytest.raises(BaseExceptionGroup) as raised:
        async with anyio.create_task_group() as tasks:
            background = Background(tasks)
            background.start("work", partial(after, 1, error=ValueError("a defect")))
            await anyio.sleep_forever()
    assert raised.group_contains(ValueError, match="a defect") and background.running == ()
