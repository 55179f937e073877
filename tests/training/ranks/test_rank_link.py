"""The rank link by itself: who may connect, and how a rank that goes silent or mad is noticed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.abc
import msgspec
import pytest

from asyncrl.training.ranks import rank_link
from asyncrl.training.ranks.rank_link import AskStack, Beat, Done, Failed, Hello, LinkAddress, LinkServer, Stack


@dataclass
class Served:
    server: LinkServer
    address: LinkAddress
    changes: list[anyio.Event] = field(default_factory=list)

    async def next_change(self) -> None:
        with anyio.fail_after(5.0):
            await self.changes[-1].wait()
        self.changes.append(anyio.Event())

    @asynccontextmanager
    async def connect(self, rank: int, token: str | None = None) -> AsyncIterator[anyio.abc.SocketStream]:
        async with await anyio.connect_tcp(self.address.host, self.address.port) as stream:
            await send(stream, Hello(rank, 1, self.address.token if token is None else token))
            yield stream


async def send(stream: anyio.abc.SocketStream, message: msgspec.Struct) -> None:
    await stream.send(msgspec.json.encode(message) + b"\n")


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    changes = [anyio.Event()]
    server = LinkServer(range(1, 3), lambda: changes[-1].set())
    async with anyio.create_task_group() as task_group:
        address = await task_group.start(server.serve, "127.0.0.1")
        yield Served(server, LinkAddress.decode(address.encode()), changes)
        task_group.cancel_scope.cancel()


async def test_a_stranger_is_shown_the_door(served: Served) -> None:
    for rank, token in ((1, "guessed"), (7, None)):
        async with served.connect(rank, token) as stream:
            with anyio.fail_after(5.0), pytest.raises(anyio.EndOfStream):
                await stream.receive()
    async with await anyio.connect_tcp(served.address.host, served.address.port) as stream:
        await send(stream, Done(5))
        with anyio.fail_after(5.0), pytest.raises(anyio.EndOfStream):
            await stream.receive()
    assert not served.server.failures
    assert served.server.done == {1: -1, 2: -1}


async def test_answers_and_failures_are_kept_by_rank(served: Served) -> None:
    async with served.connect(1) as first, served.connect(2) as second:
        await send(first, Beat())
        await send(first, Done(4))
        await served.next_change()
        await send(second, Failed(4, "ValueError", "boom", "  at the place\n"))
        await served.next_change()
        assert served.server.done == {1: 4, 2: -1}
        assert [str(f) for f in served.server.failures] == ["trainer rank 2: ValueError: boom\n  at the place"]


async def test_a_closed_connection_is_a_dead_rank_unless_it_was_told_to_leave(served: Served) -> None:
    async with served.connect(1):
        pass
    await served.next_change()
    assert [(f.rank, f.died) for f in served.server.failures] == [(1, True)]

    async with served.connect(2) as stream:
        await send(stream, Done(1))
        await served.next_change()
        await served.server.end(1.0)
        assert b"End" in await stream.receive()
    assert len(served.server.failures) == 1


async def test_silence_and_nonsense_are_named(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served.connect(1) as stream:
        await stream.send(b'{"type": "Dance"}\n')
        await served.next_change()
    assert "unreadable" in str(served.server.failures[0])

    monkeypatch.setattr(rank_link, "SILENCE_S", 0.05)
    async with served.connect(2):
        await served.next_change()
    assert "no sign of life" in str(served.server.failures[1])


async def test_ranks_are_asked_where_they_are_and_one_that_is_silent_is_not_waited_for(served: Served) -> None:
    async with served.connect(1) as first, served.connect(2) as second:
        for stream in (first, second):
            await send(stream, Done(1))
            await served.next_change()

        async def answer() -> None:
            assert msgspec.json.decode(await first.receive(), type=AskStack) == AskStack()
            await send(first, Stack("in a barrier"))

        async with anyio.create_task_group() as task_group:
            task_group.start_soon(answer)
            await served.server.ask_stacks(0.2)
        assert served.server.stacks == {1: "in a barrier"}
