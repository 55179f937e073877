"""What a spawned process finds, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from asyncrl.errors import EngineError
from asyncrl.host import EngineHost, ProcessSpec
from asyncrl.host.proc import descendants
from asyncrl.host.server import log_tail
from asyncrl.observability.events import EventLog
from tests.host.roster import Roster, parent_of

PythonSpec = Callable[..., ProcessSpec]
TreeSpec = Callable[[str], ProcessSpec]

REPORT = """
import json, os, signal
print(json.dumps({
    "sid": os.getsid(0), "pgid": os.getpgid(0), "stdin": os.readlink("/proc/self/fd/0"),
    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],
    "cpus": sorted(os.sched_getaffinity(0)), "extra": os.environ.get("EXTRA"), "home": os.environ.get("HOME"),
    "default": all(signal.getsignal(s) == signal.SIG_DFL for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
}))
"""


async def test_a_process_starts_in_a_world_of_its_own(host: EngineHost, python: PythonSpec) -> None:
    cpu = min(os.sched_getaffinity(0))
    pid = await host.spawn(python("engine-0", REPORT, env={"EXTRA": "1"}, cpus=(cpu,)))
    ended = await host.wait("engine-0")
    assert (ended.pid, ended.returncode, ended.requested) == (pid, 0, False)
    assert json.loads(ended.log_tail) == {
        "sid": pid,
        "pgid": pid,
        "stdin": "/dev/null",
        "fds": [0, 1, 2],
        "cpus": [cpu],
        "extra": "1",
        "home": os.environ.get("HOME"),
        "default": True,
        "blocked": [],
    }


async def test_what_the_host_spawns_is_no_rank_of_the_trainer(
    tmp_path: Path, python: PythonSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    async with EngineHost.start(tmp_path) as host:
        names = "('RANK', 'WORLD_SIZE', 'MASTER_PORT', 'TORCHELASTIC_USE_AGENT_STORE', 'OMP_NUM_THREADS')"
        await host.spawn(python("engine-0", f"import os; print([n for n in {names} if n in os.environ])"))
        assert (await host.wait("engine-0")).log_tail == "['OMP_NUM_THREADS']"


async def test_a_process_that_ends_by_itself_takes_its_tree_along(
    host: EngineHost, python: PythonSpec, roster: Roster, tree: TreeSpec
) -> None:
    grow = "import subprocess, sys; p = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE); p.stdout.readline(); "
    await host.spawn(python("engine-0", grow + "sys.exit(3)", *tree("unused").argv))
    ended = await host.wait("engine-0")
    assert (ended.returncode, ended.requested) == (3, False)
    await roster.empty(5)


SIGN_IN = "import os, signal, sys; fd = os.open(sys.argv[1], os.O_WRONLY); os.write(fd, b'%d\\n' % os.getpid()); "


async def test_stop_is_graceful_to_those_who_listen(host: EngineHost, python: PythonSpec, roster: Roster) -> None:
    polite = "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); " + SIGN_IN + "signal.pause()"
    await host.spawn(python("engine-0", polite, str(roster.path)))
    await roster.pids(1)
    ended = await host.stop("engine-0", grace_s=30)
    assert (ended.returncode, ended.requested) == (7, True)
    assert (
        await host.stop("engine-0", grace_s=30) == ended == await host.wait("engine-0") == await host.kill("engine-0")
    )


async def test_stop_kills_the_tree_of_those_who_do_not(host: EngineHost, roster: Roster, tree: TreeSpec) -> None:
    await host.spawn(tree("engine-0"))
    await roster.pids(3)
    start = time.monotonic()
    ended = await host.stop("engine-0", grace_s=0.3)
    assert 0.3 <= time.monotonic() - start < 8
    assert (ended.returncode, ended.requested) == (-signal.SIGKILL, True)
    await roster.empty(5)


async def test_a_second_stop_can_only_shorten_the_grace(host: EngineHost, roster: Roster, tree: TreeSpec) -> None:
    await host.spawn(tree("engine-0"))
    await roster.pids(3)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(host.stop, "engine-0", 60)
            tasks.start_soon(host.stop, "engine-0", 0.1)
            tasks.start_soon(host.stop, "engine-0", 60)


async def test_kill_is_at_once(host: EngineHost, roster: Roster, tree: TreeSpec, events: EventLog) -> None:
    pid = await host.spawn(tree("engine-0"))
    await roster.pids(3)
    ended = await host.kill("engine-0")
    assert (ended.returncode, ended.requested, ended.log_tail) == (-signal.SIGKILL, True, "the tree has grown")
    await roster.empty(5)
    told = [event for event in events.recent if event["kind"].startswith("process_")]
    assert [event["kind"] for event in told] == ["process_spawned", "process_exited"]
    assert told[1] | {"pid": pid, "name": "engine-0", "returncode": -9, "requested": True, "survivors": 0} == told[1]


async def test_any_number_may_wait(host: EngineHost, python: PythonSpec) -> None:
    pid = await host.spawn(python("engine-0", "import signal; signal.pause()"))
    exits = []

    async def wait() -> None:
        exits.append(await host.wait("engine-0"))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(wait)
        os.kill(pid, signal.SIGUSR1)
    assert len(exits) == 5
    assert {ended.returncode for ended in exits} == {-signal.SIGUSR1}


async def test_a_wait_has_a_deadline(host: EngineHost, python: PythonSpec) -> None:
    await host.spawn(python("engine-0", "import signal; signal.pause()"))
    with pytest.raises(TimeoutError, match=r"no exit from engine-0 after 0\.05 s"):
        await host.wait("engine-0", timeout_s=0.05)


async def test_a_name_belongs_to_one_live_process(host: EngineHost, python: PythonSpec, roster: Roster) -> None:
    spec = python("engine-0", "print('first', flush=True); " + SIGN_IN + "signal.pause()", str(roster.path))
    pid = await host.spawn(spec)
    with pytest.raises(EngineError, match=f"engine-0: a process of this name is alive .pid {pid}"):
        await host.spawn(spec)
    await roster.pids(1)
    await host.kill("engine-0")
    await host.spawn(python("engine-0", "print('second')"))
    ended = await host.wait("engine-0")
    assert ended.log_tail == "second"  # not the log of the one before
    log = await anyio.Path(spec.log_path).read_text()
    assert log.count("[asyncrl]") == 2
    assert "first" in log


async def test_tail_reads_the_end_of_a_long_log(host: EngineHost, python: PythonSpec) -> None:
    await host.spawn(python("engine-0", "print('x' * 70_000); print('é' * 10); print('last')"))
    ended = await host.wait("engine-0")
    assert await host.tail("engine-0", 2) == "é" * 10 + "\nlast"
    assert await host.tail("engine-0", 0) == ""
    assert len(ended.log_tail) <= 64 << 10


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ProcessSpec("engine-0", ("/nonexistent/python",)), "engine-0: cannot execute '/nonexistent/python': No such"),
        (ProcessSpec("engine-0", ("/etc/passwd",)), "engine-0: cannot execute '/etc/passwd': Permission denied"),
        (ProcessSpec("engine-0", ("a\0b",)), "engine-0: cannot execute 'a.*b': embedded null byte"),
        (ProcessSpec("engine-0", ("true",), {"A=B": "\0"}), "engine-0: cannot execute 'true': "),
        (
            ProcessSpec("engine-0", ("true",), {}, "/dev/full"),
            "engine-0: cannot write its log '/dev/full': No space left",
        ),
        (ProcessSpec("engine-0", ("true",), {}, "/proc/x/log"), "engine-0: cannot write its log '/proc/x/log': "),
        (ProcessSpec("engine-0", ("true",), cpus=(4095,)), "engine-0: cannot run on cpus .4095,.: Invalid argument"),
        (ProcessSpec("engine-0", ()), "spawn: argv is"),
        (ProcessSpec("engine-0", ("true", "x" * (1 << 20))), "engine-0: cannot execute 'true': Argument list too long"),
    ],
)
async def test_what_cannot_start_says_why(host: EngineHost, spec: ProcessSpec, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        await host.spawn(spec)
    with pytest.raises(EngineError, match=message):
        await host.wait("engine-0")
    await host.spawn(ProcessSpec("engine-0", ("true",)))
    assert (await host.wait("engine-0")).returncode == 0


async def test_what_is_too_large_for_any_process_is_refused(host: EngineHost) -> None:
    with pytest.raises(EngineError, match="engine-0: command line and environment take 3072 KiB"):
        await host.spawn(ProcessSpec("engine-0", ("true",), {"A": "x" * (3 << 20)}))


async def test_unknown_names_are_refused(host: EngineHost) -> None:
    for call in (host.wait("x"), host.stop("x", 1), host.kill("x"), host.tail("x", 1)):
        with pytest.raises(EngineError, match="x: no process of this name was ever spawned"):
            await call


async def test_a_killed_guardian_is_an_exit_like_any_other(
    host: EngineHost, python: PythonSpec, roster: Roster, tree: TreeSpec
) -> None:
    other = await host.spawn(python("other", "import signal; signal.pause()"))
    pid = await host.spawn(tree("engine-0"))
    await roster.pids(3)
    os.kill(parent_of(pid), signal.SIGKILL)
    ended = await host.wait("engine-0", timeout_s=5)
    assert (ended.returncode, ended.requested) == (-signal.SIGKILL, False)
    await roster.empty(5)
    os.kill(other, signal.SIGUSR1)
    assert (await host.wait("other")).returncode == -signal.SIGUSR1  # the others lived on


async def test_two_hundred_spawns_leave_nothing_open(host: EngineHost) -> None:
    spec = ProcessSpec("worker", ("true",))
    await host.spawn(spec)
    await host.wait("worker")
    ours, theirs = _open_fds(os.getpid()), _open_fds(host.pid)
    for _ in range(200):
        await host.spawn(spec)
        assert (await host.wait("worker")).returncode == 0
    assert _open_fds(os.getpid()) == ours
    assert _open_fds(host.pid) <= theirs + 1  # the last guardian may be about to go
    assert len(descendants(host.pid)) <= 1  # zombies included


async def test_a_storm_of_spawns_and_ends(host: EngineHost, python: PythonSpec) -> None:
    async def one(number: int) -> None:
        name = f"worker-{number}"
        await host.spawn(python(name, "import signal; signal.pause()" if number % 2 else f"raise SystemExit({number})"))
        ended = await (host.kill(name) if number % 2 else host.wait(name))
        assert ended.returncode == (-signal.SIGKILL if number % 2 else number)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(one, number)


def _open_fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


PRINTS = """
import os, sys, time
line = b"%07d " + b"x" * 91 + b"\\n"
for number in range(60_000):
    os.write(1, line % number)
    if number % 10_000 == 0:
        time.sleep(0.6)
print("the end", flush=True)
os.write(2, b"last words\\n")
"""


def test_what_was_written_just_before_a_rotation_is_among_the_last_words(tmp_path: Path) -> None:
    log, begun = tmp_path / "x.log", "[asyncrl] 2026-12-01 12:00:00 x starts\n"
    log.write_text(begun + "a\nb\n")
    (tmp_path / "x.log.1").write_text("of a run before\n")
    assert log_tail(str(log), len(begun), 3) == "a\nb"
    (tmp_path / "x.log.1").write_text(log.read_text())
    log.write_text("")
    assert log_tail(str(log), len(begun), 2) == "a\nb"
    log.write_text("c\n" + "d" * 60 + "\n")
    assert log_tail(str(log), len(begun), 3) == "b\nc\n" + "d" * 60
    assert log_tail(str(log), len(begun), 1) == "d" * 60
    log.write_text("without a guardian\n")
    assert log_tail(str(log), 0, 3) == "without a guardian"


async def test_a_process_that_prints_without_end_fills_no_disk_and_its_last_words_are_kept(
    host: EngineHost, python: PythonSpec, tmp_path: Path
) -> None:
    log = tmp_path / "chatty.log"
    log.write_text("an older run\n" * 1000)
    spec = replace(python("chatty", PRINTS), log_path=str(log), log_bytes=1_000_000)
    await host.spawn(spec)
    ended = await host.wait("chatty")
    assert ended.returncode == 0 and ended.log_tail.endswith("the end\nlast words")
    kept = log.stat().st_size + (tmp_path / "chatty.log.1").stat().st_size
    assert 0 < kept < 3_500_000, "of 6 MB that were printed"
    numbers = [int(row[:7]) for row in log.read_text().splitlines() if row[:7].isdigit()]
    assert numbers == list(range(numbers[0], 60_000)), "lines stay whole"
