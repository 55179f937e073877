"""The control socket of a job: whatever a client does, the job and the other clients go on."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asyncrl.config import Config
from asyncrl.control import client, server
from asyncrl.control.client import ask
from asyncrl.control.protocol import (
    ANSWER_BYTES,
    REQUEST_BYTES,
    Answer,
    CarriedOut,
    Request,
    ShowHealth,
    StartCell,
    StopCell,
    line_of,
    read_answer,
    short_path,
)
from asyncrl.control.server import MAX_CLIENTS, serve_control
from asyncrl.errors import ControlError, EngineError, RunDirectoryError
from asyncrl.run_directory import RunDirectory
from tests.inference.conftest import anyio_backend, eventually

pytestmark = pytest.mark.anyio
__all__ = ["anyio_backend"]  # fixture

PATIENT_S = 20.0
Handler = Callable[[Request], Any]


async def echo(request: Request) -> Answer:
    return CarriedOut(repr(request))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """A run directory that this process holds, as a job does."""
    with held(tmp_path / "run") as run:
        yield run


@contextmanager
def held(path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.open(Config.model_validate({"run": {"dir": path}})) as run:
        yield run


@asynccontextmanager
async def serving(run: RunDirectory, handler: Handler = echo) -> AsyncIterator[None]:
    async with anyio.create_task_group() as job:
        serve_control(job, run.control, handler)
        yield
        job.cancel_scope.cancel()


async def asked(run: RunDirectory, request: Request, timeout_s: float = PATIENT_S) -> str:
    answer = await anyio.to_thread.run_sync(ask, run.path, request, timeout_s)
    assert isinstance(answer, CarriedOut)
    return answer.message


async def raw(run: RunDirectory, data: bytes) -> Answer:
    """What a client that sends `data` and then nothing is told."""
    async with await anyio.connect_unix(run.control) as stream:
        with anyio.move_on_after(PATIENT_S):
            await stream.send(data)
            await stream.send_eof()
            received = b""
            while not received.endswith(b"\n"):
                received += await stream.receive()
            return read_answer(received)
    raise AssertionError("no answer")


async def test_a_request_is_answered_by_the_handler(run: RunDirectory) -> None:
    async with serving(run):
        for request in (StartCell(), StartCell("engine-1", wait=True), StopCell("engine-0", force=True), ShowHealth()):
            assert await asked(run, request) == repr(request)


async def test_only_the_owner_may_connect(run: RunDirectory) -> None:
    before = os.umask(0)
    try:
        async with serving(run):
            assert stat.S_IMODE(run.control.stat().st_mode) == 0o600
    finally:
        os.umask(before)


async def test_a_run_directory_with_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    with held(tmp_path / ("d" * 120) / ("e" * 120)) as run:
        async with serving(run):
            assert "ShowHealth" in await asked(run, ShowHealth())


async def test_the_socket_goes_with_the_job_and_one_of_a_killed_job_is_replaced(run: RunDirectory) -> None:
    with socket.socket(socket.AF_UNIX) as killed, short_path(run.control) as name:
        killed.bind(name)
    assert run.control.exists()
    with pytest.raises(ControlError, match=rf"process {os.getpid()}\) takes no commands now: it is starting"):
        await asked(run, ShowHealth())
    async with serving(run):
        assert "ShowHealth" in await asked(run, ShowHealth())
    assert not run.control.exists()
    with pytest.raises(ControlError, match="takes no commands now"):
        await asked(run, ShowHealth())


async def test_no_job_is_one_message(tmp_path: Path) -> None:
    with held(tmp_path / "run") as run:
        pass
    with pytest.raises(RunDirectoryError, match="no job is running there"):
        await asked(run, ShowHealth())
    with pytest.raises(RunDirectoryError, match="is not the directory of a run"):
        await anyio.to_thread.run_sync(ask, tmp_path, ShowHealth(), PATIENT_S)


async def test_a_refusal_is_its_message_and_a_defect_ends_neither_job_nor_server(run: RunDirectory) -> None:
    async def refuse(request: Request) -> Answer:
        if isinstance(request, StopCell):
            raise EngineError("engine-9 is the last one")
        raise KeyError("engine-9")

    async with serving(run, refuse):
        for _ in range(2):
            with pytest.raises(ControlError, match=r"^engine-9 is the last one$"):
                await asked(run, StopCell("engine-9"))
            with pytest.raises(ControlError, match=r"a defect of the job \(KeyError: 'engine-9'\)"):
                await asked(run, ShowHealth())


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "one line"),
        (b"not json\n", "not a request that this job knows"),
        (b"\xff\xfe\n", "not a request that this job knows"),
        (b'{"command":"format disk"}\n', "format disk"),
        (b'{"command":"cell stop"}\n', "missing required field `engine`"),
        (b'{"command":"cell stop","engine":17}\n', "Expected `str`"),
        (b'{"command":"cell stop","engine":"engine-0","extra":1}\n', "unknown field `extra`"),
        (b"[" * (REQUEST_BYTES - 1) + b"\n", "not a request that this job knows"),
        (b'{"command":"health"}', "one line"),
        (b"x" * (2 * REQUEST_BYTES), f"at most {REQUEST_BYTES} bytes"),
    ],
)
async def test_garbage_is_answered_and_disturbs_nobody(run: RunDirectory, data: bytes, told: str) -> None:
    async with serving(run):
        answer = await raw(run, data)
        assert told in answer.message  # type: ignore[union-attr]
        assert "ShowHealth" in await asked(run, ShowHealth())


async def test_a_client_that_sends_nothing_is_let_go_and_holds_up_nobody(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 1.0)
    async with serving(run), await anyio.connect_unix(run.control) as silent:
        await silent.send(b'{"command":')
        assert "ShowHealth" in await asked(run, ShowHealth())
        with anyio.fail_after(PATIENT_S):
            assert b"no request from a client of the control socket after 1 s" in await silent.receive()
            with pytest.raises(anyio.EndOfStream):
                await silent.receive()


async def test_a_client_that_takes_no_answer_is_let_go(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TAKE_TIMEOUT_S", 0.3)
    answered = anyio.Event()

    async def at_length(request: Request) -> Answer:
        answered.set()
        return CarriedOut("x" * (1 << 22))

    async with anyio.create_task_group() as job:
        serve_control(job, run.control, at_length)
        async with await anyio.connect_unix(run.control) as deaf:
            await deaf.send(line_of(ShowHealth()))
            await answered.wait()
            with anyio.fail_after(PATIENT_S), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                while True:
                    await anyio.sleep(0.5)
                    await deaf.receive(1 << 16)
        job.cancel_scope.cancel()


async def test_requests_are_carried_out_side_by_side_and_to_their_end_when_the_client_leaves(run: RunDirectory) -> None:
    goes_on, begun, done = anyio.Event(), anyio.Event(), anyio.Event()

    async def slowly(request: Request) -> Answer:
        if isinstance(request, StopCell):
            begun.set()
            await goes_on.wait()
            done.set()
        return CarriedOut("done")

    async with serving(run, slowly):
        async with await anyio.connect_unix(run.control) as leaves:
            await leaves.send(line_of(StopCell("engine-0")))
            await begun.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(asked, run, StopCell("engine-1"))
            assert await asked(run, ShowHealth()) == "done"
            assert not done.is_set()
            goes_on.set()
        with anyio.fail_after(PATIENT_S):
            await done.wait()


async def test_there_is_a_largest_number_of_clients(run: RunDirectory) -> None:
    waiting = 0

    async def never(request: Request) -> Answer:
        nonlocal waiting
        waiting += 1
        await anyio.sleep_forever()
        raise AssertionError

    async with serving(run, never), anyio.create_task_group() as tasks:
        for _ in range(MAX_CLIENTS):
            tasks.start_soon(raw, run, line_of(ShowHealth()))
        await eventually(lambda: waiting == MAX_CLIENTS)
        with pytest.raises(ControlError, match=f"{MAX_CLIENTS} commands are being carried out"):
            await asked(run, ShowHealth())
        tasks.cancel_scope.cancel()


async def test_the_end_of_the_job_is_told_to_a_client_that_waits(run: RunDirectory) -> None:
    begun = anyio.Event()
    told: list[str] = []

    async def never(request: Request) -> Answer:
        begun.set()
        await anyio.sleep_forever()
        raise AssertionError

    async def wait() -> None:
        with pytest.raises(ControlError) as error:
            await asked(run, StopCell("engine-0"))
        told.append(str(error.value))

    async with anyio.create_task_group() as tasks, serving(run, never):
        tasks.start_soon(wait)
        await begun.wait()
    assert "ended before it answered" in told[0]
    assert not run.control.exists()


async def test_a_job_that_does_not_answer_in_time_is_told(run: RunDirectory) -> None:
    async def never(request: Request) -> Answer:
        await anyio.sleep_forever()
        raise AssertionError

    async with serving(run, never):
        with pytest.raises(ControlError, match=r"gave no answer within 0\.2 s"):
            await asked(run, ShowHealth(), 0.2)


@pytest.mark.parametrize("answer", [b"what?\n", b"x" * (ANSWER_BYTES + 2)])
async def test_an_answer_of_another_version_is_one_message(run: RunDirectory, answer: bytes) -> None:
    async def reply(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(answer)
            await anyio.sleep_forever()

    async with anyio.create_task_group() as job, await anyio.create_unix_listener(run.control) as listener:
        job.start_soon(listener.serve, reply)
        with pytest.raises(ControlError, match="another version"):
            await asked(run, ShowHealth())
        job.cancel_scope.cancel()


async def test_a_job_whose_disk_takes_no_sockets_goes_on_without_commands(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(address: Path) -> socket.socket:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(server, "_listen", refuse)
    async with serving(run):
        with pytest.raises(ControlError, match="takes no commands now"):
            await asked(run, ShowHealth())


async def test_another_users_job_is_told_apart(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(socket.socket):
        def connect(self, address: Any) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(client.socket, "socket", Refused)
    with pytest.raises(ControlError, match="belongs to another user"):
        ask(run.path, ShowHealth(), PATIENT_S)
