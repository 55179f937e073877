"""Whatever dies, nothing that the host spawned stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc
import pytest

from asyncrl.errors import EngineError
from asyncrl.host import EngineHost, ProcessSpec
from asyncrl.host.guardian import HOST_PATIENCE_S
from asyncrl.host.proc import JOB_MARK, marked
from asyncrl.observability.events import EventLog
from tests.host.roster import Roster, command_of, parent_of

TreeSpec = Callable[[str], ProcessSpec]

GONE_S = 5.0
"""Measured: under 0.3 s on a quiet machine."""


@dataclass
class Job:
    """A rank 0 in a process of its own, with a tree under its host."""

    rank_zero: anyio.abc.Process
    host: int
    roster: Roster
    pids: list[int]
    """Everybody who signed in."""

    @property
    def main(self) -> int:
        """The process that the host spawned."""
        return next(pid for pid in self.pids if os.getsid(pid) == pid and parent_of(parent_of(pid)) == self.host)


@asynccontextmanager
async def job(directory: Path, *options: str) -> AsyncIterator[Job]:
    directory.mkdir()  # noqa: ASYNC240
    roster = Roster(directory / "roster")
    script = str(Path(__file__).with_name("rank_zero.py"))
    command = [sys.executable, script, str(directory), str(roster.path), "engine-0", *options]
    async with await anyio.open_process(command, stdin=subprocess.DEVNULL, stderr=None) as rank_zero:
        try:
            assert rank_zero.stdout is not None
            with anyio.fail_after(30):
                host = int(await rank_zero.stdout.receive())
                pids = await roster.pids(3 + len(options))
            yield Job(rank_zero, host, roster, sorted(pids))
        finally:
            if rank_zero.returncode is None:
                rank_zero.kill()
            roster.close()


@pytest.mark.parametrize(
    "victims",
    [
        ("rank_zero",),
        ("host",),
        ("rank_zero", "host"),
        ("host", "rank_zero"),
        ("guardian",),
        ("guardian", "rank_zero"),
    ],
    ids="+".join,
)
async def test_sigkill_leaves_nothing(tmp_path: Path, victims: tuple[str, ...]) -> None:
    async with job(tmp_path / "job") as running:
        targets = {"rank_zero": running.rank_zero.pid, "host": running.host, "guardian": parent_of(running.main)}
        for pid in [targets[victim] for victim in victims]:
            os.kill(pid, signal.SIGKILL)
        await running.roster.empty(GONE_S)


async def vanished(exists: Callable[[], bool]) -> None:
    with anyio.fail_after(GONE_S):
        while exists():  # noqa: ASYNC110
            await anyio.sleep(0.02)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
async def test_a_host_that_stands_still_outlives_rank_zero_for_seconds_only(tmp_path: Path, signum: int) -> None:
    async with job(tmp_path / "job") as running:
        os.kill(running.host, signal.SIGSTOP)
        running.rank_zero.send_signal(signum)
        await running.roster.empty(GONE_S + HOST_PATIENCE_S)
        await vanished(lambda: bool(command_of(running.host)))


@pytest.mark.parametrize("victim", ["rank_zero", "host"])
async def test_temporary_files_go_with_the_tree_however_the_job_ends(tmp_path: Path, victim: str) -> None:
    async with job(tmp_path / "job") as running:
        scratch = tmp_path / "job" / "tmp" / "0"
        assert scratch.stat().st_mode & 0o777 == 0o700
        (scratch / "socket").touch()
        os.kill(running.rank_zero.pid if victim == "rank_zero" else running.host, signal.SIGKILL)
        await running.roster.empty(GONE_S)
        await vanished(scratch.parent.exists)


async def test_a_fork_that_holds_the_lifeline_does_not_keep_the_job_alive(tmp_path: Path) -> None:
    async with job(tmp_path / "job", "fork") as running:
        (fork,) = {pid for pid in running.pids if "rank_zero.py" in command_of(pid)}
        try:
            running.rank_zero.kill()
            await running.roster.empty(GONE_S)
        finally:
            os.kill(fork, signal.SIGKILL)


async def test_an_exception_of_rank_zero_leaves_nothing(tmp_path: Path) -> None:
    async with job(tmp_path / "job") as running:
        running.rank_zero.send_signal(signal.SIGINT)  # KeyboardInterrupt in the loop
        await running.roster.empty(GONE_S)


async def test_jobs_side_by_side_do_not_touch_each_other(tmp_path: Path) -> None:
    async with job(tmp_path / "first") as first, job(tmp_path / "second") as second:
        for pid in (first.host, first.rank_zero.pid):
            os.kill(pid, signal.SIGKILL)
        await first.roster.empty(GONE_S)
        with pytest.raises(TimeoutError):
            await second.roster.empty(0.5)
        assert all(command_of(pid) for pid in (*second.pids, second.host))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
async def test_the_host_ignores_what_a_terminal_or_launcher_sends(
    host: EngineHost, roster: Roster, tree: TreeSpec, signum: int
) -> None:
    await host.spawn(tree("engine-0"))
    await roster.pids(3)
    os.kill(host.pid, signum)
    assert await host.tail("engine-0", 1) == "the tree has grown"


async def test_the_death_of_the_host_is_told_to_everyone(
    tmp_path: Path, roster: Roster, tree: TreeSpec, events: EventLog
) -> None:
    errors = []

    async def expect_death(call: Callable[..., Awaitable[object]], *args: object) -> None:
        with pytest.raises(EngineError, match=r"engine host \(pid [0-9]+\): it died") as caught:
            await call(*args)
        errors.append(caught.value)

    async with EngineHost.start(tmp_path / "logs", events) as host:
        await host.spawn(tree("engine-0"))
        await roster.pids(3)
        os.kill(host.pid, signal.SIGSTOP)  # so that the requests are under way when it dies
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(expect_death, host.wait, "engine-0")
                tasks.start_soon(expect_death, host.tail, "engine-0", 1)
                tasks.start_soon(expect_death, host.stop, "engine-0", 1)
                tasks.start_soon(expect_death, host.spawn, tree("engine-1"))
                await anyio.wait_all_tasks_blocked()
                os.kill(host.pid, signal.SIGKILL)
            await expect_death(host.spawn, tree("engine-2"))
        await roster.empty(GONE_S)
    assert len(errors) == 5
    assert not marked(host.job)
    assert events.recent[-1]["kind"] == "host_ended"
    assert events.recent[-1] | {"expected": False, "survivors": 0} == events.recent[-1]


async def test_the_mark_is_a_net_under_the_guardians(
    tmp_path: Path, host: EngineHost, roster: Roster, tree: TreeSpec
) -> None:
    """Host and guardian die in the same instant: the process dies with its guardian, its marked child by the net."""
    pid = await host.spawn(tree("engine-0"))
    pids = await roster.pids(3)
    child = next(p for p in pids if p != pid and os.getsid(p) == pid)
    assert {pid, child} <= set(marked(host.job))
    guardian = parent_of(pid)
    leaf = next(p for p in pids if p not in (pid, child))
    for victim in (guardian, host.pid):
        os.kill(victim, signal.SIGSTOP)
    for victim in (host.pid, guardian):
        os.kill(victim, signal.SIGKILL)
    os.kill(leaf, signal.SIGKILL)  # it had cleared its environment: beyond this net
    await roster.empty(GONE_S + 5)
    async with await anyio.open_process(["sleep", "60"], env={JOB_MARK: "another job"}) as bystander:
        await host.aclose()
        assert command_of(bystander.pid) == "sleep 60 "
        bystander.kill()


async def test_a_process_that_renames_itself_keeps_its_mark(host: EngineHost, tmp_path: Path) -> None:
    """As SGLang's schedulers do."""
    code = "import os, time, setproctitle; setproctitle.setproctitle('sglang::scheduler'); os.mkfifo('named')"
    argv = (sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {code}; time.sleep(60)")
    pid = await host.spawn(ProcessSpec("engine-0", argv, log_path=str(tmp_path / "engine-0.log")))
    with anyio.fail_after(20):
        while not (tmp_path / "named").exists():  # noqa: ASYNC110 another process makes it
            await anyio.sleep(0.02)
    assert command_of(pid).startswith("sglang::scheduler")
    assert pid in marked(host.job)


async def test_a_stopped_host_cannot_hold_up_the_end(
    tmp_path: Path, roster: Roster, tree: TreeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.host.client.SHUTDOWN_TIMEOUT_S", 0.3)
    async with EngineHost.start(tmp_path / "logs") as host:
        await host.spawn(tree("engine-0"))
        await roster.pids(3)
        os.kill(host.pid, signal.SIGSTOP)
    await roster.empty(GONE_S)
