"""Real processes and real signals: no process of a job is left, whichever of them gets the signal.

Most tests run under `agent.py`, which imitates torchrun's agent. Real torchrun (5 CPU seconds per start) has one case
here, and the whole matrix under `long`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest

from asyncrl.exit_protocol import RankZeroExit
from asyncrl.exit_protocol.policy import REPEAT_S
from tests.host.roster import Roster

HERE = Path(__file__).parent
INT, TERM, HUP, KILL, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGUSR1

STOP_GRACE_S = 1.5
BOUND_S = 15.0
"""The promise for the default grace of 12 s. With the grace of these tests, it leaves room for a busy machine."""

FAKE_AGENT = (str(HERE / "agent.py"), "2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@dataclass
class Job:
    """A running job of an agent, its ranks and a host."""

    agent: anyio.abc.Process
    directory: Path
    roster: Roster

    def pid(self, who: str) -> int:
        return self.agent.pid if who == "agent" else int((self.directory / f"{who}.pid").read_text())


@asynccontextmanager
async def job(
    directory: Path, agent: tuple[str, ...], mode: str, stop_grace_s: float = STOP_GRACE_S
) -> AsyncIterator[Job]:
    """Starts the ranks under `agent` and a host with a process tree; yields once all of them run."""
    roster = Roster(directory / "roster")
    program = (str(HERE / "rank_program.py"), str(directory), mode, str(stop_grace_s))
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    with (directory / "output").open("wb") as output:
        command = (sys.executable, *agent, *program)
        async with await anyio.open_process(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        ) as process:
            try:
                await roster.pids(5 if "2" in agent else 4, timeout_s=60)
                yield Job(process, directory, roster)
            except BaseException:
                print((directory / "output").read_text())
                raise
            finally:
                if process.returncode is None:
                    process.kill()
                roster.close()


async def hit(running: Job, who: str, signals: tuple[signal.Signals, ...]) -> None:
    for number, signum in enumerate(signals):
        if number:
            await anyio.sleep(REPEAT_S + 0.2)
        with contextlib.suppress(ProcessLookupError):  # the first signal has already ended it
            os.kill(running.pid(who), signum)


HOW = {
    "agent": [(INT,), (TERM,), (HUP,), (KILL,), (INT, INT)],
    "rank-0": [(INT,), (TERM,), (HUP,), (KILL,), (INT, TERM)],
    "rank-1": [(KILL,)],
}
MODES = ["listen", "stuck", "undisposable"]


def name_of(value: object) -> str:
    return "+".join(signum.name for signum in value) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("who", HOW)
async def test_nothing_outlives_a_job_that_listens(tmp_path: Path, who: str) -> None:
    await at_once(tmp_path, FAKE_AGENT, "listen", *((who, how) for how in HOW[who]))


@pytest.mark.parametrize("mode", ["stuck", "undisposable"])
async def test_nothing_outlives_a_job_that_does_not(tmp_path: Path, mode: str) -> None:
    for output in await at_once(tmp_path, FAKE_AGENT, mode, ("agent", (INT,)), ("agent", (HUP,)), ("rank-0", (TERM,))):
        assert "rank 0 leaves by force: stopping after SIG" in output
        assert "rank 1 leaves by force: " in output  # at its own deadline, or 2 s after rank 0 left


async def at_once(
    directory: Path, agent: tuple[str, ...], mode: str, *cases: tuple[str, tuple[signal.Signals, ...]]
) -> list[str]:
    """Runs one job for each case (process, signals) at the same time; returns their output."""
    outputs = []

    async def one(who: str, how: tuple[signal.Signals, ...]) -> None:
        place = directory / f"{who}-{name_of(how)}"
        place.mkdir()
        async with job(place, agent, mode) as running:
            await hit(running, who, how)
            await running.roster.empty(BOUND_S)
            with anyio.fail_after(10):
                await running.agent.wait()
            assert running.agent.returncode != 0
        outputs.append((place / "output").read_text())

    async with anyio.create_task_group() as tasks:
        for who, how in cases:
            tasks.start_soon(one, who, how)
    return outputs


async def test_a_second_signal_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    async with job(tmp_path, FAKE_AGENT, "stuck", stop_grace_s=60.0) as running:
        rank_zero = os.pidfd_open(running.pid("rank-0"))
        await hit(running, "rank-0", (INT, TERM))
        with anyio.fail_after(BOUND_S):
            await anyio.wait_readable(rank_zero)
        os.close(rank_zero)
        await running.roster.empty(BOUND_S)
    assert "rank 0 leaves by force: SIGTERM while stopping" in (tmp_path / "output").read_text()


async def test_a_graceful_stop_ends_well(tmp_path: Path) -> None:
    async with job(tmp_path, (str(HERE / "agent.py"), "1"), "steps") as running:
        await hit(running, "rank-0", (USR1,))
        await running.roster.empty(BOUND_S)
        assert await running.agent.wait() == 0


async def test_torchrun_killed_takes_its_ranks_along(tmp_path: Path) -> None:
    async with job(tmp_path, TORCHRUN, "stuck") as running:
        await hit(running, "agent", (KILL,))
        await running.roster.empty(BOUND_S)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("who", "how"), [(who, how) for who in HOW for how in HOW[who]], ids=name_of)
async def test_nothing_outlives_torchrun(tmp_path: Path, mode: str, who: str, how: tuple[signal.Signals, ...]) -> None:
    await at_once(tmp_path, TORCHRUN, mode, (who, how))


@pytest.mark.parametrize("use_uvloop", [True, False])
def test_handlers_and_wakeup_are_put_back(use_uvloop: bool) -> None:
    before = [signal.getsignal(signum) for signum in (INT, TERM, HUP, USR1)]

    async def main() -> None:
        inside = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(inside, warn_on_full_buffer=False)
        with RankZeroExit(60.0, environ={}) as rank_exit:
            os.kill(os.getpid(), USR1)
            with anyio.fail_after(5):
                while not rank_exit.stop.requested:  # noqa: ASYNC110 a flag, as the loop sees it
                    await anyio.sleep(0.01)
        outside = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(outside, warn_on_full_buffer=False)
        assert outside == inside

    anyio.run(main, backend_options={"use_uvloop": use_uvloop})
    assert [signal.getsignal(signum) for signum in (INT, TERM, HUP, USR1)] == before


@pytest.mark.parametrize("use_uvloop", [True, False])
def test_a_stop_cancels_the_scope_and_is_remembered(use_uvloop: bool) -> None:
    """Runs in its own process, because after a stop the watch stays until the process ends."""
    code = f"""
import anyio, os, signal
from asyncrl.exit_protocol import RankZeroExit
async def main():
    with RankZeroExit(60.0, environ={{}}) as rank_exit:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rank_exit.stop_on_signals, tasks.cancel_scope)
            os.kill(os.getpid(), signal.SIGTERM)
            await anyio.sleep_forever()
        print(rank_exit.stopped_by.name, rank_exit.exit_code)
anyio.run(main, backend_options={{"use_uvloop": {use_uvloop}}})
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert ran.stdout == "SIGTERM 143\n"
    assert ran.stderr == ""
