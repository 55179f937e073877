"""The driver's side: takes requests on a Unix socket and has the job's handler answer them.

Invariants
- No client can end the job or hold up another client: each connection is a task of its own, a request has to come and
  an answer has to be taken within seconds, and the number of connections is bounded.
- A request that was read is carried out to its end, even if its client leaves.
- Every request is answered, garbage too, unless the job ends first. Then the connection is closed.
- The socket is removed when the job's task group ends. A killed job leaves it behind; the next one replaces it. (The
  lock of the run directory sees to it that there is one job at a time.)
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
import structlog
from anyio.abc import SocketListener, SocketStream, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream

from asyncrl.control.protocol import REQUEST_BYTES, Answer, Refused, Request, line_of, read_request, short_path
from asyncrl.errors import AsyncRLError
from asyncrl.observability.waits import waiting

REQUEST_TIMEOUT_S = 5.0
"""For a client to send its request."""
TAKE_TIMEOUT_S = 5.0
"""For a client to take its answer."""
MAX_CLIENTS = 16

Handler = Callable[[Request], Awaitable[Answer]]
"""Carries a request out; its own waits have deadlines. Raises AsyncRLError for one that it refuses."""

_log = structlog.get_logger(__name__)


def serve_control(task_group: TaskGroup, address: Path, handler: Handler) -> None:
    """Has `handler` answer requests at `address`, in `task_group` until that is cancelled; listens when it returns.

    If the disk of `address` takes no sockets, the job goes on without commands, and a warning says so.
    """
    try:
        listening = _listen(address)
    except OSError as error:
        _warn(address, error)
        return
    task_group.start_soon(_serve, listening, address, handler, name="control")


def _listen(address: Path) -> socket.socket:
    address.unlink(missing_ok=True)  # of a job that was killed
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listening.fileno(), 0o600)  # the file that `bind` makes has this mode from its first moment on
        with short_path(address) as name:
            listening.bind(name)
        listening.listen(MAX_CLIENTS)
    except OSError:
        listening.close()
        raise
    return listening


async def _serve(listening: socket.socket, address: Path, handler: Handler) -> None:
    try:
        listener = await SocketListener.from_socket(listening)
        async with listener:
            await listener.serve(_Server(handler).converse)
    except OSError as error:  # out of descriptors, for instance
        _warn(address, error)
    finally:
        _end(listening, address)


def _end(listening: socket.socket, address: Path) -> None:
    listening.close()
    address.unlink(missing_ok=True)


def _warn(address: Path, error: OSError) -> None:
    _log.warning("the job takes no commands (asyncrl cell, health)", socket=str(address), reason=str(error))


class _Server:
    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._clients = 0

    async def converse(self, stream: SocketStream) -> None:
        """Reads one request from a client, has it answered, and sends the answer."""
        self._clients += 1
        try:
            async with stream:
                answer = await self._answer(stream)
                # A client that has left, or does not read, gets no answer.
                with suppress(anyio.BrokenResourceError), anyio.move_on_after(TAKE_TIMEOUT_S):
                    await stream.send(line_of(answer))
        finally:
            self._clients -= 1

    async def _answer(self, stream: SocketStream) -> Answer:
        if self._clients > MAX_CLIENTS:
            return Refused(f"{MAX_CLIENTS} commands are being carried out; try again when one has ended")
        try:
            with waiting("request", "a client of the control socket", REQUEST_TIMEOUT_S):
                line = await BufferedByteReceiveStream(stream).receive_until(b"\n", REQUEST_BYTES)
            request = read_request(line)
        except (anyio.DelimiterNotFound, anyio.IncompleteRead, anyio.BrokenResourceError) as error:
            return Refused(f"not a request of at most {REQUEST_BYTES} bytes and one line: {type(error).__name__}")
        except (TimeoutError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return Refused(f"not a request that this job knows: {error}")
        try:
            return await self._handler(request)
        except AsyncRLError as error:
            return Refused(str(error))
        except Exception as error:  # a defect of the handler: no command may end the job
            _log.exception("a command failed", command=type(request).__name__)
            return Refused(f"a defect of the job ({type(error).__name__}: {error}); its log has the traceback")
