from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from structlog.testing import capture_logs

from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import Wait, WaitRegistry
from asyncrl.observability.watchdog import _LOOK_S, LoopMonitor, OverdueWaits, watch_stalls

pytestmark = pytest.mark.anyio

THRESHOLD_S = 0.3


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # the condition is a log line, which sets no event
        await anyio.sleep(0.01)


def told(logs: list[Any]) -> list[str]:
    """Returns the warnings in `logs`, except those that a busy machine causes when it does not run the process."""
    return [line["event"] for line in logs if "the process did not run" not in line["event"]]


def test_a_wait_is_reported_once_when_half_of_its_deadline_is_over() -> None:
    policy = OverdueWaits(min_age_s=5.0)
    wait = Wait("first generation", "engine-0", since=0.0, deadline_s=600.0)
    assert policy.newly_overdue([wait], 299.0) == ()
    assert policy.newly_overdue([wait], 301.0) == (wait,)
    assert policy.newly_overdue([wait], 400.0) == ()


def test_a_short_wait_is_left_to_its_own_deadline() -> None:
    policy = OverdueWaits(min_age_s=5.0)
    assert policy.newly_overdue([Wait("header", "engine-0", since=0.0, deadline_s=4.0)], 3.9) == ()


def test_waits_that_ended_are_forgotten() -> None:
    policy = OverdueWaits(min_age_s=0.0)
    wait = Wait("answer", "engine-0", since=0.0, deadline_s=1.0)
    policy.newly_overdue([wait], 1.0)
    assert policy.newly_overdue([], 2.0) == ()
    assert policy._reported == set()


async def test_a_silent_engine_is_named_in_the_log() -> None:
    registry, events = WaitRegistry(), EventLog(None)
    with capture_logs() as logs, registry.register("response", "engine-1", 0.1):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: watch_stalls(registry, events=events, interval_s=0.01, min_age_s=0.0))
            with anyio.fail_after(5):
                await until(lambda: bool(logs))
            await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()
    (line,) = logs
    (event,) = events.recent
    assert (event["kind"], event["component"]) == ("fault_seen", "engine-1")
    assert line["log_level"] == "warning"
    assert re.fullmatch(r"still waiting for response from engine-1, \d+\.\d s of 0\.1 s", line["event"])


Reward = Callable[[threading.Event], None]
"""Blocks until a helper thread sets the event. The monitor does not look at that thread's stack."""


def slow_reward(enough: threading.Event) -> None:
    while not enough.is_set():
        time.sleep(0.05)


def reward_that_waits_for_a_lock(enough: threading.Event) -> None:
    enough.wait()


def reward_that_computes_in_c(enough: threading.Event) -> None:
    while not enough.is_set():
        sum(range(30_000_000))  # one call into C that never releases the GIL


async def blocked_by(function: Reward, events: EventLog | None = None) -> list[str]:
    """Blocks a loop with `function`; returns the warnings, from the first one that names the function."""
    monitor = LoopMonitor(threshold_s=THRESHOLD_S, events=events)
    enough = threading.Event()

    def tell_when_named() -> None:
        give_up = time.monotonic() + 10
        while not named() and time.monotonic() < give_up:
            time.sleep(0.02)
        time.sleep(1.5 * _LOOK_S)  # lets the monitor look once more; it must report nothing new
        enough.set()

    with capture_logs() as logs:

        def named() -> list[str]:
            return list(dropwhile(lambda event: function.__name__ not in event, told(logs)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(monitor.run)
            threading.Thread(target=tell_when_named).start()
            await anyio.sleep(0.3)
            function(enough)
            with anyio.fail_after(5):
                await until(lambda: len(named()) > 1)
            tasks.cancel_scope.cancel()
    assert monitor.statistics().blocks == sum("is blocked for" in event for event in told(logs))
    assert monitor.statistics().max_lag_s > THRESHOLD_S
    return named()


@pytest.mark.parametrize("function", [slow_reward, reward_that_waits_for_a_lock, reward_that_computes_in_c])
@pytest.mark.parametrize("uvloop", [True, False])
async def test_the_function_that_blocks_the_loop_is_named_with_its_line(
    function: Reward, anyio_backend: object, uvloop: bool
) -> None:
    events = EventLog(None)
    blocked, again, *_ = await blocked_by(function, events)
    place = rf"{function.__name__} \({re.escape(__file__)}:\d+\)"
    assert re.fullmatch(rf"the event loop is blocked for \d+\.\d s by {place}; give that work to .*", blocked)
    assert re.fullmatch(r"the event loop turns again after \d+\.\d s", again)
    (event,) = [event for event in events.recent if function.__name__ in event["what"]]
    assert (event["kind"], event["component"]) == ("fault_seen", "event loop")


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    callspec = getattr(request.node, "callspec", None)
    return "asyncio", {"use_uvloop": callspec.params.get("uvloop", True) if callspec else True}


async def test_a_loop_that_keeps_its_pace_is_left_alone() -> None:
    monitor = LoopMonitor(threshold_s=THRESHOLD_S)
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(monitor.run)
            await anyio.to_thread.run_sync(time.sleep, 2.5 * THRESHOLD_S)  # slow, but in a thread
            tasks.cancel_scope.cancel()
    held_up = monitor.statistics().max_lag_s > THRESHOLD_S  # if the machine held it up, a warning is right
    assert told(logs) == [] or held_up
    assert monitor.statistics().blocks == 0


async def test_a_loop_starved_by_an_import_is_no_news_and_one_that_stays_so_is() -> None:
    monitor = LoopMonitor(threshold_s=0.2)
    monitor._beat = time.monotonic() - 0.4  # a loop that does not turn, in a thread that runs no function
    watch = threading.Thread(target=monitor._watch, args=(-1,))
    with capture_logs() as logs:
        watch.start()
        with anyio.fail_after(10):
            await until(lambda: bool(told(logs)))
        monitor._stop.set()
        await anyio.to_thread.run_sync(watch.join)
    (line,) = told(logs)
    late = re.fullmatch(r"the event loop did not turn for (\S+) s, yet runs nothing: starved by .*", line)
    assert late is not None and float(late[1]) >= 1.0


async def test_modules_that_a_start_imports_are_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text(f"import time; time.sleep({2.5 * THRESHOLD_S})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monitor = LoopMonitor(threshold_s=THRESHOLD_S)
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(monitor.run)
            await anyio.sleep(0.2)
            importlib.import_module("slow_to_import")
            await anyio.sleep(0.2)
            tasks.cancel_scope.cancel()
    assert monitor.statistics().max_lag_s > THRESHOLD_S
    assert told(logs) == []


@contextmanager
def killed_after(seconds: float, process: subprocess.Popen[str]) -> Iterator[None]:
    """Kills `process` at the end of the body or after `seconds`, so that reading from it always ends."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        process.kill()


SUSPENDED = """
import anyio
from asyncrl.observability.watchdog import LoopMonitor

async def main():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(LoopMonitor(threshold_s=0.3).run)
        await anyio.sleep(0.3)
        print("ready", flush=True)
        await anyio.sleep_forever()

anyio.run(main, backend_options={"use_uvloop": True})
"""


def test_a_stopped_process_is_not_taken_for_a_blocked_loop() -> None:
    stood_still = re.compile(r"the process did not run for (\d+\.\d) s: stopped, suspended, or starved of CPU")
    with (
        subprocess.Popen([sys.executable, "-c", SUSPENDED], stdout=subprocess.PIPE, text=True) as process,
        killed_after(30, process),
    ):
        assert process.stdout is not None
        assert any("ready" in line for line in process.stdout)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        process.send_signal(signal.SIGCONT)
        for line in process.stdout:
            assert "the event loop is blocked" not in line
            if (found := stood_still.search(line)) and float(found[1]) >= 1.0:  # shorter stops come from a busy machine
                break
        else:
            pytest.fail("no warning named the stop")


DUMP = """
import signal, sys, time
from asyncrl.observability.waits import WAITS
from asyncrl.observability.watchdog import dump_on_signal

def stuck():
    print("ready", flush=True)
    time.sleep(60)

with open(sys.argv[1], "w") as stream, dump_on_signal(stream), WAITS.register("ack", "trainer rank 1", 60.0):
    stuck()
"""


def test_a_signal_dumps_every_stack_and_the_waits(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    with subprocess.Popen([sys.executable, "-c", DUMP, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGUSR2)
        deadline = time.monotonic() + 20
        while "waits for" not in path.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    assert "in stuck" in path.read_text()
    assert re.search(r"driver waits for: ack from trainer rank 1, \d+\.\d s of 60 s", path.read_text())
