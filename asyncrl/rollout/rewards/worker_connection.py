"""The driver's end of the socket to a reward worker: frames, and a check of the peer."""

from __future__ import annotations

import itertools
import os
import socket
import struct
from typing import TypeVar

import anyio
import msgspec
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from asyncrl.rollout.rewards.frames import HEADER, LONGEST_ANSWER_BYTES

T = TypeVar("T")


class WorkerDied(Exception):
    """The worker's socket closed."""


class Garbled(Exception):
    """The worker sent something that is no answer to the call."""


class WorkerConnection:
    """Frames over the worker's socket. WorkerDied: it closed; Garbled: the worker sent something else than frames."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self._buffer = BufferedByteReceiveStream(stream)
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        """The number of the next call."""
        return next(self._numbers)

    async def send(self, body: bytes) -> None:
        """Sends one frame. Raises WorkerDied."""
        try:
            await self._stream.send(body)
        except anyio.BrokenResourceError as error:
            raise WorkerDied from error

    async def receive(self, kind: type[T]) -> T:
        """The next frame. Raises WorkerDied, Garbled."""
        try:
            (size,) = HEADER.unpack(await self._buffer.receive_exactly(HEADER.size))
            if size > LONGEST_ANSWER_BYTES:
                raise Garbled(f"a frame of {size} bytes")
            return msgspec.msgpack.decode(await self._buffer.receive_exactly(size), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Garbled(str(error)) from error
        except (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.EndOfStream) as error:
            raise WorkerDied from error


def is_ours(stream: SocketStream) -> bool:
    """Whether the peer belongs to our user, as the kernel says: an abstract socket has no permissions of its own."""
    connection = stream.extra(SocketAttribute.raw_socket)
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())
