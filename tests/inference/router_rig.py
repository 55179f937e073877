"""The real router as a process of its own, and stand-ins for engines in the test's own loop."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anyio
from aiohttp import web
from anyio.abc import Process

from asyncrl.config.sections.inference import RouterConfig
from asyncrl.host.ports import PortAllocator
from asyncrl.inference.routing.router_client import RouterClient
from asyncrl.inference.sglang.launch import router_argv
from asyncrl.tasks import Changes

HOST = "127.0.0.1"


async def eventually(satisfied: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
    """Waits for something in another process that no event tells."""
    with anyio.fail_after(timeout_s):
        while True:
            if await satisfied():
                return
            await anyio.sleep(0.02)


@dataclass(eq=False)
class StandIn:
    """What a router asks of an engine, and /generate with an answer that `rollout` takes."""

    status: int = 200
    """Of /generate."""
    error_code: str | None = None
    """The router's own word for what went wrong, where the stand-in plays a router."""
    served: list[str] = field(default_factory=list)
    """Request ids that were answered with 200."""
    keys: list[str | None] = field(default_factory=list)
    """Routing keys that arrived here."""
    running: int = 0
    looks: int = 0
    """How often its health was asked for, and told."""
    silent: bool = False
    """Answers nothing at all, as a stopped process."""
    drops: bool = False
    """Breaks the connection of /generate."""
    url: str = ""
    _released: anyio.Event | None = None
    _changes: Changes = field(default_factory=Changes)

    def hold(self) -> None:
        """Requests wait from now on, as in a paused engine; /ping still answers."""
        self._released = anyio.Event()

    def release(self) -> None:
        if self._released is not None:
            self._released.set()
            self._released = None

    async def until_running(self, count: int) -> None:
        with anyio.fail_after(20):
            while self.running < count:
                await self._changes.wait()

    async def answer(self, request: web.Request) -> web.Response:
        if self.silent:
            await anyio.sleep_forever()
        if request.path == "/generate":
            return await self._generate(request)
        self.looks += request.path == "/ping"
        model = {"model_path": "", "served_model_name": "m", "tp_size": 1, "dp_size": 1, "is_generation": True}
        known = {"/ping", "/health", "/model_info", "/get_model_info", "/server_info", "/get_server_info"}
        return web.json_response(model) if request.path in known else web.Response(status=404)

    async def _generate(self, request: web.Request) -> web.Response:
        rid = (await request.json()).get("rid")
        self.keys.append(request.headers.get("X-SMG-Routing-Key"))
        self.running += 1
        self._changes.notify()
        try:
            if self._released is not None:
                await self._released.wait()
        finally:
            self.running -= 1
        if self.drops:
            assert request.transport is not None
            request.transport.abort()
        if self.status != 200:
            headers = {} if self.error_code is None else {"X-SMG-Error-Code": self.error_code}
            return web.json_response({"error": {"message": "scripted"}}, status=self.status, headers=headers)
        self.served.append(rid)
        meta = {
            "id": rid,
            "finish_reason": {"type": "stop"},
            "weight_version": "0.1",
            "weight_versions": [{"version": "0.1", "start": 0, "end": 1}],
            "output_token_logprobs": [[-0.5, 1, None]],
            "completion_tokens": 1,
        }
        return web.json_response({"text": "", "output_ids": [1], "meta_info": meta})


@asynccontextmanager
async def stand_in(port: int = 0) -> AsyncIterator[StandIn]:
    """A running stand-in; leaving it breaks its connections, as the end of a process does."""
    engine = StandIn()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", engine.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, port, backlog=1024).start()
        engine.url = f"http://{HOST}:{runner.addresses[0][1]}"
        yield engine
    finally:
        engine.release()
        with anyio.CancelScope(shield=True):
            await runner.cleanup()


@dataclass
class RealRouter:
    """A running router; its ports stay reserved when it is killed, as the job's are."""

    config: RouterConfig
    port: int
    prometheus_port: int
    log: Path
    client: RouterClient
    session: aiohttp.ClientSession
    process: Process

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def start_again(self) -> None:
        self.process = await spawn(self.config, self.port, self.prometheus_port, self.log)
        await self.client.wait_answering(20)

    async def add(self, *engines: StandIn) -> None:
        for engine in engines:
            await self.client.add(engine.url, 10)

    async def generate(self, rid: str = "r", key: str | None = None) -> int:
        """Status of one request; raises aiohttp.ClientError where the router gives none."""
        body = {"rid": rid, "input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
        headers = {} if key is None else {"X-SMG-Routing-Key": key}
        async with self.session.post(self.client.url + "/generate", json=body, headers=headers) as response:
            await response.read()
            return response.status

    async def sequence(self, count: int, key: str | None = None) -> list[int]:
        """Statuses of `count` requests, one after the other."""
        return [await self.generate(f"s{index:04d}", key) for index in range(count)]

    async def burst(self, count: int) -> list[int]:
        """Statuses of `count` requests at once."""
        with anyio.fail_after(20):
            async with self.requests(count) as statuses:
                pass
        return statuses

    @asynccontextmanager
    async def requests(self, count: int, key: str | None = None) -> AsyncIterator[list[int]]:
        """`count` requests on their way; the list holds the statuses of those that were answered, at the end of all."""
        statuses: list[int] = []

        async def one(rid: str) -> None:
            statuses.append(await self.generate(rid, key))

        async with anyio.create_task_group() as group:
            for index in range(count):
                group.start_soon(one, f"r{index:04d}")
            yield statuses


async def spawn(config: RouterConfig, port: int, prometheus_port: int, log: Path) -> Process:
    argv = router_argv(config, host=HOST, port=port, prometheus_port=prometheus_port)
    with log.open("ab") as output:
        return await anyio.open_process(argv, stdin=None, stdout=output, stderr=output, env=dict(os.environ))


@asynccontextmanager
async def real_router(log_dir: Path, **config: Any) -> AsyncIterator[RealRouter]:
    """A router that answers and has no engines, with settings of the `router` section."""
    section = RouterConfig.model_validate(config)
    ports = PortAllocator()
    port, prometheus_port, log = ports.reserve(), ports.reserve(), log_dir / "router.log"
    process = await spawn(section, port, prometheus_port, log)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(connector=connector) as session:
            client = RouterClient(f"http://{HOST}:{port}", session)
            router = RealRouter(section, port, prometheus_port, log, client, session, process)
            try:
                await client.wait_answering(20)
                yield router
            finally:
                with anyio.CancelScope(shield=True):
                    if router.process.returncode is None:
                        await router.kill()
    finally:
        ports.close()
