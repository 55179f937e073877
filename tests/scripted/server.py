"""The life of a scripted process: it listens on a port, answers or fails as its fault book says, and ends.

Invariants
- `run` is the process. It returns the exit code once the process is killed; then no part of the process is left. A test
  may run it again: memory is fresh each time, while faults and the record of calls belong to the test and stay.
- A handler goes on when its client leaves, as in the engine (unless `ends_with_client`). It ends with the process.
- A killed process resets its connections at once and never answers again.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import msgspec
from aiohttp import web

from asyncrl.tasks import Changes
from tests.scripted.faults import Fault, FaultBook

Handler = Callable[[dict[str, Any], web.Request], Awaitable[web.StreamResponse]]
"""Answers a request, from its decoded body and the request itself."""

SIGKILL = -9
"""Exit code of a process that SIGKILL ended."""
_FIRST_PID = 5_000_001  # above the kernel's limit, so no real process can have it and none can be signalled by mistake
_pids = itertools.count(_FIRST_PID)


def answer(status: int = 200, /, **body: Any) -> web.Response:
    """Makes a JSON answer."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def error(message: str, status: int = 400) -> web.Response:
    """Makes an error answer in the engine's form."""
    return answer(status, error={"message": message})


CONTROL = frozenset(
    {
        *("flush_cache", "abort_request", "pause_generation", "continue_generation", "update_weight_version"),
        *("begin_weight_update", "end_weight_update", "init_weights_update_group", "destroy_weights_update_group"),
        *("update_weights_from_distributed", "update_weights_from_tensor", "update_weights_from_disk"),
        *("weights_checker", "release_memory_occupation", "resume_memory_occupation"),
        *("workers", "add_worker", "remove_worker"),
    }
)
"""Endpoints that need the key, where the server has one."""


class ScriptedServer:
    """The common part of engine and router. Subclasses name their endpoints."""

    ends_with_client = False
    """True: a handler ends when its client leaves."""

    def __init__(self) -> None:
        self.faults = FaultBook()
        """Faults that later calls meet."""
        self.calls: list[str] = []
        """Endpoints in the order of their calls, over all lives."""
        self.key: str | None = None
        """What control calls must bear; None: nothing."""
        self.exit_code: int | None = None
        """A test may set it; then the process exits with it at its next start."""
        self.last_words = "last words"
        """The end of its log."""
        self.lives = 0
        """Number of starts."""
        self.pid = 0
        """Made-up process id of the current or last life."""
        self.url = ""
        """Address of the current or last life."""
        self._runner: web.AppRunner | None = None
        self._handlers: set[anyio.CancelScope] = set()
        self._ended = anyio.Event()
        self._returncode = 0
        self._suspended = False
        self._changes = Changes()

    # for subclasses to override

    def fresh_memory(self) -> None:
        """Resets the memory of the process; `run` calls it when a life begins."""

    def forget(self) -> None:
        """Closes what the process holds open; `kill` calls it when a life ends."""

    def freeze(self) -> None:
        """Stops the part of the process behind its HTTP server."""
        self.suspend()

    def handlers(self) -> dict[str, Handler]:
        """Returns the handler of each endpoint."""
        raise NotImplementedError

    def endpoint(self, http: web.Request) -> str:
        """Returns the name of the endpoint that a request calls."""
        return http.path.strip("/")

    # life

    @property
    def alive(self) -> bool:
        """True from a start until the process is killed."""
        return self._runner is not None and not self._ended.is_set()

    async def run(
        self,
        port: int = 0,
        host: str = "127.0.0.1",
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> int:
        """Serves on `port` (0: a free one) until killed; returns the exit code."""
        assert self._runner is None, "the process before has not ended"
        self.lives += 1
        self.pid = next(_pids)
        self._ended = anyio.Event()
        self._returncode = SIGKILL
        self.go_on()
        if self.exit_code is not None:
            self._ended.set()
            task_status.started()
            return self.exit_code
        self.fresh_memory()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = self._runner = web.AppRunner(
            app, handler_cancellation=self.ends_with_client, shutdown_timeout=0.01, access_log=None
        )
        try:
            await runner.setup()
            await web.TCPSite(runner, host, port, reuse_address=True, backlog=4096).start()
            self.url = f"http://{host}:{runner.addresses[0][1]}"
            task_status.started()
            await self._ended.wait()
        finally:
            with anyio.CancelScope(shield=True):
                self.kill(self._returncode)
                await runner.cleanup()
                self._runner = None
        return self._returncode

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """Runs the process without a host, while the context is entered; yields its URL."""
        async with anyio.create_task_group() as task_group:
            await task_group.start(self.run, port)
            try:
                yield self.url
            finally:
                self.kill()

    def kill(self, returncode: int = SIGKILL) -> None:
        """Ends the process now: resets its connections and cancels its handlers."""
        if not self._ended.is_set():
            self._returncode = returncode
            self._ended.set()
        self.forget()
        for scope in tuple(self._handlers):
            scope.cancel()
        server = self._runner.server if self._runner is not None else None
        for connection in () if server is None else tuple(server.connections):
            if connection.transport is not None:
                connection.transport.abort()

    def suspend(self) -> None:
        """Does what SIGSTOP does: accepts connections and reads requests, but answers none until `go_on`."""
        self._suspended = True

    def go_on(self) -> None:
        """Does what SIGCONT does."""
        self._suspended = False
        self._changes.notify()

    async def _until_going(self) -> None:
        while self._suspended:
            await self._changes.wait()

    # requests

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        with anyio.CancelScope() as scope:
            self._handlers.add(scope)
            try:
                return await self._respond(http)
            finally:
                self._handlers.discard(scope)
        return web.Response(status=500)  # nobody gets it: the process has ended

    async def _respond(self, http: web.Request) -> web.StreamResponse:
        raw = await http.read()
        await self._until_going()
        endpoint = self.endpoint(http)
        handler = self.handlers().get(endpoint)
        if handler is None:
            return answer(404, detail="Not Found")
        self.calls.append(endpoint)
        if self.key is not None and endpoint in CONTROL and http.headers.get("Authorization") != f"Bearer {self.key}":
            return answer(401, error="Unauthorized")
        fault = self.faults.next(endpoint)
        if fault is not None and fault.when == "before":
            replaced = await self._fail(fault, http, None)
            if replaced is not None:
                return replaced
        try:
            body = msgspec.json.decode(raw) if raw else {}
        except msgspec.DecodeError as problem:
            return error(f"JSON decode error: {problem}")
        response = await handler(body, http)
        await self._until_going()
        if fault is not None and fault.when == "after":
            return await self._fail(fault, http, response) or response
        return response

    async def _fail(self, fault: Fault, http: web.Request, response: web.Response | None) -> web.StreamResponse | None:
        """Carries out a fault; returns the answer that replaces the normal one, or None to go on normally."""
        match fault.kind:
            case "status":
                return answer(fault.status, success=False, message=fault.message, error={"message": fault.message})
            case "hang":
                await (anyio.sleep_forever() if fault.seconds is None else anyio.sleep(fault.seconds))
            case "freeze":
                self.freeze()
                if response is not None:
                    await anyio.sleep_forever()
            case "die":
                self.kill()
                await anyio.sleep_forever()
            case "drop":
                _reset(http)
                return web.Response()
            case "garbage":
                return web.Response(text="<html>not JSON</html>")
            case "call":
                assert fault.action is not None
                await fault.action()
            case "truncate" | "slow":
                assert response is not None, "there is no body to cut before the effect"
                return await _send_badly(http, response, None if fault.kind == "truncate" else fault.seconds or 0.0)
        return None


async def _send_badly(http: web.Request, response: web.Response, seconds: float | None) -> web.StreamResponse:
    """Sends half of the body and closes the connection; with `seconds`, sends all of it over this time."""
    body = response.body
    assert isinstance(body, bytes)
    length = str(len(body) or 1)
    stream = web.StreamResponse(status=response.status, headers={"Content-Length": length})
    await stream.prepare(http)
    if seconds is None:
        await stream.write(body[: len(body) // 2])
        _reset(http)
        return stream
    pieces = 4
    size = -(-len(body) // pieces) or 1
    for at in range(0, len(body), size):
        await anyio.sleep(seconds / pieces)
        await stream.write(body[at : at + size])
    return stream


def _reset(http: web.Request) -> None:
    if http.transport is not None:
        http.transport.abort()
