"""A scripted engine and router for the fast tests: they speak the endpoints that the controller uses.

The engine keeps a weight model: a map from tensor name to a value, of which checksums are made. Faults are set per
endpoint. Both run in the test's own event loop; `ScriptedHost` starts them where the real host would spawn processes.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
import anyio
from aiohttp import web

from asyncrl.errors import EngineError
from asyncrl.host import ProcessExit, ProcessSpec

Fault = Callable[[], Awaitable[web.Response | None]]


async def hang() -> None:
    await anyio.sleep_forever()


def refuse(status: int, message: str = "refused by script") -> Fault:
    async def fault() -> web.Response:
        return web.json_response({"success": False, "message": message}, status=status)

    return fault


@dataclass
class ScriptedEngine:
    """State of one engine; `faults` maps an endpoint (without the slash) to what happens instead of answering."""

    weights: dict[str, str] = field(default_factory=lambda: {"embed": "base", "layer": "base"})
    known: frozenset[str] = frozenset({"embed", "layer"})
    version: str = "default"
    paused: bool = False
    session: bool = False
    calls: list[str] = field(default_factory=list)
    faults: dict[str, Fault] = field(default_factory=dict)
    exit_code: int | None = None

    def receive(self, weights: dict[str, str]) -> None:
        """A transfer: unknown names are ignored, as the real engine does."""
        self.weights |= {name: value for name, value in weights.items() if name in self.known}

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{endpoint}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        endpoint = request.match_info["endpoint"]
        body = await request.json() if request.can_read_body else {}
        self.calls.append(endpoint)
        if endpoint in self.faults:
            response = await self.faults[endpoint]()
            if response is not None:
                return response
        handler: Callable[[dict], web.Response] = getattr(self, f"_on_{endpoint}")
        return handler(body)

    def _on_ping(self, body: dict) -> web.Response:
        return web.Response()

    def _on_generate(self, body: dict) -> web.Response:
        count = body["sampling_params"]["max_new_tokens"]
        meta = {"weight_version": self.version, "completion_tokens": count, "finish_reason": {"type": "length"}}
        return web.json_response({"text": "", "output_ids": [1] * count, "meta_info": meta})

    def _on_model_info(self, body: dict) -> web.Response:
        return web.json_response({"model_path": "m", "weight_version": self.version, "is_generation": True})

    def _on_pause_generation(self, body: dict) -> web.Response:
        self.paused = True
        return web.json_response({"status": "ok"})

    def _on_continue_generation(self, body: dict) -> web.Response:
        self.paused = False
        return web.json_response({"status": "ok"})

    def _on_abort_request(self, body: dict) -> web.Response:
        return web.Response()

    def _on_update_weight_version(self, body: dict) -> web.Response:
        assert body["abort_all_requests"] is False
        self.version = body["new_version"]
        return web.json_response({"success": True, "message": "", "new_version": self.version})

    def _on_begin_weight_update(self, body: dict) -> web.Response:
        if self.session:
            return web.json_response({"success": False, "message": "already open"}, status=400)
        self.session = True
        return web.json_response({"success": True, "message": ""})

    def _on_end_weight_update(self, body: dict) -> web.Response:
        if not self.session:
            return web.json_response({"success": False, "message": "no session"}, status=400)
        self.session = False
        return web.json_response({"success": True, "message": ""})

    def _on_weights_checker(self, body: dict) -> web.Response:
        if body["action"] == "reset_tensors":
            self.weights = {name: str(random.random()) for name in self.weights}
            return web.json_response({"success": True, "message": ""})
        rank = {"checksums": dict(self.weights), "per_gpu_checksum": str(sorted(self.weights.items()))}
        return web.json_response({"success": True, "message": "", "ranks": [rank]})


class ScriptedRouter:
    """Workers by url; /generate goes to the first."""

    def __init__(self) -> None:
        self.workers: list[str] = []
        self.generate_status = 200
        self.list_status = 200

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/workers", self._list)
        app.router.add_post("/workers", self._add)
        app.router.add_delete("/workers/{id}", self._remove)
        app.router.add_post("/generate", self._generate)
        return app

    async def _list(self, request: web.Request) -> web.Response:
        if self.list_status != 200:
            return web.Response(status=self.list_status)
        entries = [{"id": url.rpartition(":")[2], "url": url, "is_healthy": True} for url in self.workers]
        return web.json_response({"workers": entries, "total": len(entries)})

    async def _add(self, request: web.Request) -> web.Response:
        self.workers.append((await request.json())["url"])
        return web.json_response({"worker_id": "x"}, status=202)

    async def _remove(self, request: web.Request) -> web.Response:
        self.workers = [url for url in self.workers if not url.endswith(":" + request.match_info["id"])]
        return web.json_response({}, status=202)

    async def _generate(self, request: web.Request) -> web.Response:
        if self.generate_status != 200 or not self.workers:
            return web.json_response({"error": "no available workers"}, status=503)
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.workers[0] + "/generate", json=await request.json()) as response,
        ):
            return web.Response(body=await response.read(), status=response.status)


class ScriptedHost:
    """Answers like the engine host; `spawn` serves the scripted engine or router of that name on the port in argv."""

    def __init__(self, engines: dict[str, ScriptedEngine], router: ScriptedRouter) -> None:
        self.engines = engines
        self.router = router
        self.specs: dict[str, ProcessSpec] = {}
        self.dead = False
        self._runners: dict[str, web.AppRunner] = {}
        self._exits: dict[str, ProcessExit] = {}
        self._ended: dict[str, anyio.Event] = {}

    async def spawn(self, spec: ProcessSpec) -> int:
        self.specs[spec.name] = spec
        self._ended[spec.name] = anyio.Event()
        script = self.engines.get(spec.name)
        if script is not None and script.exit_code is not None:
            await self._end(spec.name, script.exit_code, "Traceback (most recent call last):\nOSError: broken model")
            return 1
        app = self.router.app() if script is None else script.app()
        runner = self._runners[spec.name] = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        port = int(spec.argv[spec.argv.index("--port") + 1])
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        return 1

    async def wait(self, name: str) -> ProcessExit:
        await self._ended[name].wait()
        if self.dead:
            raise EngineError("engine host: it died")
        return self._exits[name]

    async def stop(self, name: str, grace_s: float) -> ProcessExit:
        if name not in self.specs:
            raise EngineError(f"{name}: no process of this name was ever spawned")
        return await self._end(name, -15)

    async def kill(self, name: str) -> ProcessExit:
        return await self._end(name, -9)

    def die(self) -> None:
        """The host itself ends, and every process with it."""
        self.dead = True
        for ended in self._ended.values():
            ended.set()

    async def tail(self, name: str, lines: int) -> str:
        return "last words"

    async def _end(self, name: str, returncode: int, log_tail: str = "last words") -> ProcessExit:
        if name not in self._exits:
            self._exits[name] = ProcessExit(name, 1, returncode, log_tail)
            runner = self._runners.pop(name, None)
            if runner is not None:
                await runner.cleanup()
            self._ended[name].set()
        return self._exits[name]
