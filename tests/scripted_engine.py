"""An aiohttp server that speaks the engine's /generate, with chosen answers, latencies and faults.

For scale and fault tests only: what it answers is made up. Tests drive it by replacing `script`, which is asked before
each answer what to do with a request, and read `requests` afterwards. Weight versions are a plain attribute. It stands
for the router too, which knows one engine: itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import anyio
import msgspec
from aiohttp import web

from asyncrl.data.fleet import ROUTING_KEY_HEADER

Fault = Literal["status", "hang", "drop", "truncate", "garbage", "abort", "refuse"]


@dataclass(frozen=True, slots=True)
class Action:
    """What to do with one request; the default answers `output_ids` at once."""

    output_ids: tuple[int, ...] = (1, 2, 3)
    text: str = "yes"
    logprobs: tuple[float | None, ...] | None = None
    finish: str = "stop"
    latency_s: float = 0.0
    fault: Fault | None = None
    status: int = 500
    """For the fault `status`."""
    body: bytes = b'{"error": {"message": "scripted"}}'
    """For the faults `status` and `garbage`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """For the fault `status`."""
    versions: tuple[tuple[str, int, int], ...] | None = None
    """None: all tokens by the engine's current version."""


@dataclass(slots=True)
class ScriptedEngine:
    """The server's state; `url` is set while it runs."""

    script: Callable[[dict[str, Any], int], Action] = lambda request, number: Action()
    """Called with the request's body and its number since the start."""
    version: str = "0.1"
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    routing_keys: list[str] = field(default_factory=list)
    """Of each request; empty for none."""
    in_flight: int = 0
    most_in_flight: int = 0
    disconnected: int = 0
    """Requests whose client went away before the answer."""
    released: anyio.Event = field(default_factory=anyio.Event)
    """Set it to let hanging requests go."""
    aborts: list[str] = field(default_factory=list)
    """Ids that it was told to abort."""
    load: tuple[int, int, float] = (0, 0, 0.0)
    """What /v1/loads says: requests that run, that wait, and the fraction of the KV pool in use."""
    _hanging: dict[str, anyio.Event] = field(default_factory=dict)
    """By id: what an abort sets."""

    _changed: anyio.Event = field(default_factory=anyio.Event)

    async def until(self, condition: Callable[[ScriptedEngine], bool]) -> None:
        """Waits until `condition` holds, looking whenever a request comes or goes."""
        with anyio.fail_after(10):
            while not condition(self):
                await self._changed.wait()

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def generate(self, http: web.Request) -> web.StreamResponse:
        request = msgspec.json.decode(await http.read())
        number = len(self.requests)
        self.requests.append(request)
        self.routing_keys.append(http.headers.get(ROUTING_KEY_HEADER, ""))
        action = self.script(request, number)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self._change()
        try:
            if action.fault == "hang":
                action = await self._hang(request["rid"], action)
            elif action.latency_s:
                await anyio.sleep(action.latency_s)
            return await self._answer(http, request, action)
        except anyio.get_cancelled_exc_class():
            self.disconnected += 1
            raise
        finally:
            self.in_flight -= 1
            self._change()

    async def _hang(self, rid: str, action: Action) -> Action:
        """Until it is let go, or aborted: the engine ends every request whose id begins like one that it knows."""
        aborted = self._hanging[rid] = anyio.Event()
        try:
            async with anyio.create_task_group() as either:
                for event in (aborted, self.released):
                    either.start_soon(_cancel_after, event, either.cancel_scope)
        finally:
            del self._hanging[rid]
        return replace(action, fault="abort" if aborted.is_set() else None)

    async def abort(self, http: web.Request) -> web.Response:
        rid = msgspec.json.decode(await http.read())["rid"]
        self.aborts.append(rid)
        for known, event in self._hanging.items():
            if rid in self._hanging and known.startswith(rid):
                event.set()
        self._change()
        return web.Response()

    def abort_all(self) -> None:
        for event in self._hanging.values():
            event.set()

    async def workers(self, http: web.Request) -> web.Response:
        return web.json_response({"workers": [{"id": "0", "url": self.url, "is_healthy": True}], "total": 1})

    async def loads(self, http: web.Request) -> web.Response:
        running, waiting, usage = self.load
        load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": usage}
        return web.json_response({"loads": [load]})

    async def _answer(self, http: web.Request, request: dict[str, Any], action: Action) -> web.StreamResponse:
        if action.fault == "status":
            return web.Response(
                status=action.status, body=action.body, headers=action.headers, content_type="application/json"
            )
        if action.fault == "garbage":
            return web.Response(body=action.body, content_type="application/json")
        body = self._body(request, action)
        if action.fault == "drop":
            assert http.transport is not None
            http.transport.abort()
            return web.Response()
        if action.fault == "truncate":
            response = web.StreamResponse(
                headers={"Content-Length": str(len(body)), "Content-Type": "application/json"}
            )
            await response.prepare(http)
            await response.write(body[: len(body) // 2])
            assert http.transport is not None
            http.transport.close()
            return response
        return web.Response(body=body, content_type="application/json")

    def _body(self, request: dict[str, Any], action: Action) -> bytes:
        ids = action.output_ids
        logprobs = action.logprobs or tuple(-0.5 for _ in ids)
        finish: dict[str, Any] = {"type": action.finish}
        if action.fault == "abort":
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        if action.fault == "refuse":
            finish = {"type": "abort", "message": "Input too long", "status_code": 400, "err_type": "BadRequestError"}
        spans = action.versions if action.versions is not None else ((self.version, 0, len(ids)),)
        return msgspec.json.encode(
            {
                "text": action.text,
                "output_ids": ids,
                "meta_info": {
                    "id": request["rid"],
                    "finish_reason": finish,
                    "prompt_tokens": len(request["input_ids"]),
                    "weight_version": self.version,
                    "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
                    "input_token_logprobs": [],
                    "output_token_logprobs": [[lp, token, None] for lp, token in zip(logprobs, ids, strict=True)],
                    "completion_tokens": len(ids),
                    "cached_tokens": 0,
                    "e2e_latency": 0.01,
                },
            }
        )


async def _cancel_after(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


@asynccontextmanager
async def scripted_engine(
    script: Callable[[dict[str, Any], int], Action] | None = None, port: int = 0
) -> AsyncIterator[ScriptedEngine]:
    """A running engine on loopback, on a free port unless told."""
    engine = ScriptedEngine() if script is None else ScriptedEngine(script=script)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/abort_request", engine.abort)
    app.router.add_get("/workers", engine.workers)
    app.router.add_get("/v1/loads", engine.loads)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port, backlog=4096)
        await site.start()
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield engine
    finally:
        engine.released.set()
        await runner.cleanup()
