"""Rank 0's side: cancellation, a blocked loop, nonsense on the wire, the end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import EngineError
from asyncrl.host import EngineHost, ProcessSpec
from asyncrl.host.client import ANSWER_TIMEOUT_S
from asyncrl.host.process import LineBuffer, encode
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import WAITS
from tests.host.roster import Roster

PythonSpec = Callable[..., ProcessSpec]
TreeSpec = Callable[[str], ProcessSpec]


async def test_an_abandoned_spawn_leaves_no_process(host: EngineHost, tree: TreeSpec) -> None:
    for _ in range(10):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(host.spawn, tree("engine-0"))
                await anyio.lowlevel.checkpoint()  # it asks in its first turn
                scope.cancel()
        try:  # it ended before it had started, or was killed
            await host.wait("engine-0", timeout_s=30)  # a guardian has 10 s to kill its tree
        except EngineError:
            continue
    await host.spawn(ProcessSpec("engine-0", ("true",)))
    assert (await host.wait("engine-0", timeout_s=10)).returncode == 0


async def test_answers_to_abandoned_requests_are_dropped(host: EngineHost, roster: Roster, tree: TreeSpec) -> None:
    await host.spawn(tree("engine-0"))
    await roster.pids(3)
    for call, args in ((host.tail, (1,)), (host.wait, ())):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call, "engine-0", *args)
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
    assert await host.tail("engine-0", 1) == "the tree has grown"
    with anyio.move_on_after(0.01):
        await host.stop("engine-0", grace_s=0.1)
    assert (await host.wait("engine-0", timeout_s=5)).requested  # the stop went on without its caller
    assert [wait for wait in WAITS.snapshot() if wait.subject == "engine-0"] == []


async def test_a_blocked_loop_misses_nothing(host: EngineHost, python: PythonSpec) -> None:
    """The host has more to say than the socket holds while nobody listens, and does not wait for it."""
    names = [f"worker-{number}" for number in range(12)]
    for name in names:
        await host.spawn(python(name, "import time; time.sleep(0.3); print('x' * 60_000)"))
    time.sleep(1.5)  # noqa: ASYNC251 this is the point
    for name in names:
        assert (await host.wait(name, timeout_s=5)).returncode == 0


async def test_a_block_longer_than_the_deadline_is_no_timeout(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    await host.spawn(ProcessSpec("first", ("true",)))
    await host.wait("first", timeout_s=30)
    monkeypatch.setattr("asyncrl.host.client.ANSWER_TIMEOUT_S", 0.2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(host.spawn, ProcessSpec("engine-0", ("true",)))
        await anyio.wait_all_tasks_blocked()
        select.select([host._lifeline], [], [], 30)  # the answer is there
        time.sleep(0.3)  # noqa: ASYNC251 this is the point
    assert ANSWER_TIMEOUT_S == 30


async def test_a_silent_host_is_an_error_that_names_it(host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    await host.spawn(ProcessSpec("first", ("true",)))
    monkeypatch.setattr("asyncrl.host.client.ANSWER_TIMEOUT_S", 0.2)
    os.kill(host.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"engine host: no spawn from engine-0 after 0\.2 s; it is stopped"):
        await host.spawn(ProcessSpec("engine-0", ("sleep", "100")))
    os.kill(host.pid, signal.SIGCONT)
    assert (await host.wait("engine-0", timeout_s=5)).requested  # whatever came of it had no owner


async def test_the_end_is_idempotent_and_survives_cancellation(
    tmp_path: Path, roster: Roster, tree: TreeSpec, events: EventLog
) -> None:
    with anyio.CancelScope() as scope:
        async with EngineHost.start(tmp_path / "logs", events) as host:
            await host.spawn(tree("engine-0"))
            await roster.pids(3)
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    await roster.empty(5)
    assert (await host.wait("engine-0")).requested
    await host.aclose()
    with pytest.raises(EngineError, match="engine host: it is closed"):
        await host.spawn(tree("engine-1"))
    assert [e["kind"] for e in events.recent].count("host_ended") == 1


async def test_concurrent_ends_all_wait_for_the_one(tmp_path: Path, roster: Roster, tree: TreeSpec) -> None:
    async with EngineHost.start(tmp_path / "logs") as host:
        await host.spawn(tree("engine-0"))
        await roster.pids(3)
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(host.aclose)
        await roster.empty(5)


async def test_an_error_in_the_body_comes_out_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="mine"):
        async with EngineHost.start(tmp_path):
            raise EngineError("mine")


async def test_a_host_that_cannot_start_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the directory should be")
    with pytest.raises(EngineError, match="engine host: cannot start it"):
        async with EngineHost.start(tmp_path / "logs"):
            pass


def test_nonsense_on_the_lifeline_is_answered_and_survived(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    root = str(Path(__file__).parents[2])
    boot = f"import sys; sys.path.insert(0, {root!r}); from asyncrl.host.server import main; main()"
    command = [sys.executable, "-I", "-S", "-c", boot, str(theirs.fileno()), str(os.getpid()), "0"]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as host:
        theirs.close()
        ours.settimeout(10)
        answers = ours.makefile("r")
        for line in (
            b"\xff\xfe",
            b"[]",
            b"{",
            b"[" * 100_000,
            b"null",
            b'{"op":["spawn"]}',
            b'{"id":1,"op":"nonesuch"}',
        ):
            ours.sendall(line + b"\n")
            assert '"error":"' in answers.readline()
        for fields in ({}, {"name": 1}, {"argv": ["a", 1]}, {"argv": ["a"], "env": {"a": 1}}, {"argv": "a"}):
            ours.sendall(encode({"id": 2, "op": "spawn", **fields}))
            assert answers.readline().startswith('{"id":2,"error":"')
        ours.sendall(b"x" * (5 << 20) + b"\n" + encode({"id": 3, "op": "kill", "name": "x"}))
        seen = ""
        while '"id":3' not in seen:
            seen = answers.readline()
        answers.close()
        ours.close()
        assert host.wait(10) == 0


def test_the_host_imports_the_standard_library_only() -> None:
    root = str(Path(__file__).parents[2])
    code = (
        f"import sys; sys.path.insert(0, {root!r}); import asyncrl.host.server;"
        "print(sorted({name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    )
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "['__main__', 'asyncrl']\n"


async def test_the_host_is_small(host: EngineHost) -> None:
    await host.spawn(ProcessSpec("engine-0", ("sleep", "60")))
    status = await anyio.Path(f"/proc/{host.pid}/status").read_text()
    (resident_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    assert resident_kib < 25 << 10


@settings(max_examples=50)
@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3)), st.integers(1, 50))
def test_lines_survive_any_cut(messages: list[dict[str, str]], size: int) -> None:
    stream = b"".join(encode(message) for message in messages)
    lines = LineBuffer()
    out = [m for start in range(0, len(stream), size) for m in lines.feed(stream[start : start + size])]
    assert out == messages
