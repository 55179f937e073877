from __future__ import annotations

import threading
from collections.abc import Iterator

import anyio
import pytest
from structlog.testing import capture_logs

from asyncrl.training.ranks.trainer_thread import TrainerThread


@pytest.fixture
def thread() -> Iterator[TrainerThread]:
    thread = TrainerThread()
    yield thread
    thread.close()


async def test_calls_run_in_order_and_all_in_one_daemon_thread(thread: TrainerThread) -> None:
    order: list[int] = []
    threads: set[threading.Thread] = set()

    def call(i: int) -> int:
        order.append(i)
        threads.add(threading.current_thread())
        return i * i

    jobs = [thread.submit(lambda i=i: call(i), what=f"call {i}") for i in range(50)]
    squares = await thread.call(call, 50, what="the last", timeout_s=5.0)

    assert squares == 2500
    assert [job.result() for job in jobs] == [i * i for i in range(50)]
    assert order == list(range(51))
    assert len(threads) == 1 and threads.pop().daemon


async def test_an_exception_reaches_the_caller_and_the_thread_goes_on(thread: TrainerThread) -> None:
    def fail() -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        await thread.call(fail, what="failing", timeout_s=5.0)
    assert await thread.call(lambda: 7, what="the next", timeout_s=5.0) == 7


async def test_even_a_system_exit_belongs_to_the_caller(thread: TrainerThread) -> None:
    def leave() -> None:
        raise SystemExit(3)

    job = thread.submit(leave, what="leaving")
    await job.wait()
    assert isinstance(job.exception, SystemExit)
    assert await thread.call(lambda: 7, what="the next", timeout_s=5.0) == 7


async def test_a_call_that_hangs_ends_by_its_deadline_and_can_be_named(thread: TrainerThread) -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"no long training from trainer thread after 0\.05 s"):
        await thread.call(release.wait, what="long training", timeout_s=0.05)

    with pytest.raises(TimeoutError):
        await thread.call(lambda: 1, what="queued behind it", timeout_s=0.05)
    statistics = thread.statistics()
    assert statistics.running == "long training"
    assert statistics.running_since is not None
    assert statistics.queued == 1
    assert "release.wait" in thread.stack() or "self._cond" in thread.stack() or "threading.py" in thread.stack()
    release.set()
    assert await thread.call(lambda: 2, what="after it", timeout_s=5.0) == 2
    assert thread.statistics().running is None


async def test_a_cancelled_call_that_had_not_begun_is_skipped(thread: TrainerThread) -> None:
    release = threading.Event()
    ran: list[str] = []
    blocker = thread.submit(release.wait, what="blocker")
    with anyio.move_on_after(0.05) as scope:
        await thread.call(ran.append, "skipped", what="cancelled", timeout_s=5.0)
    release.set()
    await thread.call(ran.append, "ran", what="the next", timeout_s=5.0)

    assert scope.cancelled_caught
    assert blocker.done
    assert ran == ["ran"]


async def test_the_exception_of_a_cancelled_call_is_logged(thread: TrainerThread) -> None:
    release = threading.Event()

    def fail_later() -> None:
        release.wait()
        raise ValueError("too late")

    with capture_logs() as logs:
        with anyio.move_on_after(0.05):
            await thread.call(fail_later, what="cancelled", timeout_s=5.0)
        release.set()
        await thread.call(lambda: None, what="the next", timeout_s=5.0)

    assert [(entry["call"], entry["error"]) for entry in logs] == [("cancelled", "ValueError: too late")]


async def test_the_loop_runs_on_while_the_thread_is_busy(thread: TrainerThread) -> None:
    release = threading.Event()
    ticks = 0
    async with anyio.create_task_group() as task_group:
        task_group.start_soon(lambda: thread.call(release.wait, what="busy", timeout_s=5.0))
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
            ticks += 1
        release.set()
    assert ticks == 20


def test_a_result_that_comes_after_the_loop_was_closed_is_dropped() -> None:
    thread = TrainerThread()
    release = threading.Event()

    async def leave_early() -> None:
        with anyio.move_on_after(0.02):
            await thread.call(release.wait, what="outlives the loop", timeout_s=5.0)

    anyio.run(leave_early)
    release.set()
    assert anyio.run(lambda: thread.call(lambda: 5, what="another loop", timeout_s=5.0)) == 5
    thread.close()
