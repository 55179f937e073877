"""An engine that answers each /generate request as a test says, for tests of the client and the executor.

A test sets `script`, a function that decides the answer to each request, and reads `requests` afterwards. The weight
version is a plain attribute. `server` makes answers fail on the wire, as for every scripted process. The engine also
plays the router in front of itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import anyio
from aiohttp import web

from asyncrl.data.fleet import ROUTING_KEY_HEADER
from asyncrl.tasks import Changes, first_of
from tests.scripted.faults import Fault
from tests.scripted.server import Handler, ScriptedServer, answer

AnswerFault = Literal["status", "hang", "drop", "truncate", "garbage", "abort", "refuse"]
"""What may go wrong with an answer. `hang`: it waits until an abort or `released`. `abort` and `refuse`: see `_ENDS`.
The others are kinds of `Fault`."""

_ENDS: dict[AnswerFault, dict[str, Any]] = {
    "abort": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
    "refuse": {"type": "abort", "message": "Input too long", "status_code": 400, "err_type": "BadRequestError"},
}
"""Finish reasons of the faults that come in an answer of status 200."""


@dataclass(frozen=True, slots=True)
class Action:
    """What the engine does with one request. By default it answers `output_ids` at once."""

    output_ids: tuple[int, ...] = (1, 3, 2)
    """The last is the end token of the tokenizer of the tests."""
    text: str = "yes"
    logprobs: tuple[float | None, ...] | None = None
    """None: -0.5 for each token."""
    finish: str = "stop"
    """Finish reason of an answer without a fault."""
    latency_s: float = 0.0
    """Time until the answer."""
    fault: AnswerFault | None = None
    status: int = 500
    """HTTP status of the fault `status`."""
    message: str = "scripted"
    """Message of the fault `status`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers of an answer with the fault `status`."""
    versions: tuple[tuple[str, int, int], ...] | None = None
    """(version, start, end) of each span; None: the engine's current version made all tokens."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `meta_info` that replace the true ones."""


Script = Callable[[dict[str, Any], int], Action]
"""Decides what to do with a request, from its body and its number since the start."""


class AnsweringEngine(ScriptedServer):
    """An engine that follows a script; `url` is set while it runs."""

    ends_with_client = True

    def __init__(self, script: Script | None = None) -> None:
        super().__init__()
        self.script: Script = script or (lambda request, number: Action())
        self.version = "0.1"
        """Weight version that it stamps on tokens."""
        self.requests: list[dict[str, Any]] = []
        """Bodies of all requests, in order."""
        self.in_flight = 0
        """Requests without an answer so far."""
        self.most_in_flight = 0
        """Largest value of `in_flight` so far."""
        self.disconnected = 0
        """Number of requests whose client left before the answer."""
        self.released = anyio.Event()
        """A test sets it to let all hanging requests be answered."""
        self.routing_keys: list[str] = []
        """Routing key of each request; empty if the request had none."""
        self.aborts: list[str] = []
        """Ids in the abort requests that it got."""
        self.load = (0, 0, 0.0)
        """Answer to /v1/loads: running requests, waiting requests, fraction of the KV pool in use."""
        self._hanging: dict[str, anyio.Event] = {}
        """By request id, the event that an abort sets."""
        self._changes = Changes()

    async def until(self, condition: Callable[[AnsweringEngine], bool]) -> None:
        """Waits until `condition` holds; looks whenever a request arrives or ends."""
        with anyio.fail_after(10):
            while not condition(self):
                await self._changes.wait()

    def handlers(self) -> dict[str, Handler]:
        """The few endpoints that a client and an executor need."""
        return {
            "generate": self._generate,
            "abort_request": self._abort,
            "workers": self._workers,
            "v1/loads": self._loads,
        }

    def abort_all(self) -> None:
        """Ends all hanging requests with finish reason `abort`."""
        for event in self._hanging.values():
            event.set()

    async def _abort(self, body: dict[str, Any], http: web.Request) -> web.Response:
        """If the id is that of a hanging request, aborts all hanging requests whose ids begin with it."""
        rid = body["rid"]
        self.aborts.append(rid)
        for known, event in self._hanging.items():
            if rid in self._hanging and known.startswith(rid):
                event.set()
        self._changes.notify()
        return web.Response()

    async def _workers(self, body: dict[str, Any], http: web.Request) -> web.Response:
        return answer(workers=[{"id": "0", "url": self.url, "is_healthy": True}], total=1)

    async def _loads(self, body: dict[str, Any], http: web.Request) -> web.Response:
        running, waiting, usage = self.load
        load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": usage}
        return answer(loads=[load])

    async def _hang(self, rid: str, action: Action) -> Action:
        """Waits until the request is released or aborted; returns the action that then follows."""
        aborted = self._hanging[rid] = anyio.Event()
        try:
            await first_of(aborted.wait, self.released.wait)
        finally:
            del self._hanging[rid]
        return replace(action, fault="abort" if aborted.is_set() else None)

    async def _generate(self, body: dict[str, Any], http: web.Request) -> web.StreamResponse:
        action = self.script(body, len(self.requests))
        self.requests.append(body)
        self.routing_keys.append(http.headers.get(ROUTING_KEY_HEADER, ""))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self._changes.notify()
        try:
            if action.fault == "hang":
                action = await self._hang(body["rid"], action)
            elif action.latency_s:
                await anyio.sleep(action.latency_s)
            return await self._respond_with(action, body, http)
        except anyio.get_cancelled_exc_class():
            self.disconnected += 1
            raise
        finally:
            self.in_flight -= 1
            self._changes.notify()

    async def _respond_with(self, action: Action, body: dict[str, Any], http: web.Request) -> web.StreamResponse:
        response = answer(**self._payload(action, body))
        match action.fault:
            case "status" | "drop" | "truncate" | "garbage" as kind:
                fault = Fault("generate", kind, status=action.status, message=action.message)
                failed = await self._fail(fault, http, response) or response
                failed.headers.update(action.headers)
                return failed
        return response

    def _payload(self, action: Action, body: dict[str, Any]) -> dict[str, Any]:
        ids = action.output_ids
        logprobs = action.logprobs or tuple(-0.5 for _ in ids)
        spans = action.versions if action.versions is not None else ((self.version, 0, len(ids)),)
        return {
            "text": action.text,
            "output_ids": ids,
            "meta_info": {
                "id": body["rid"],
                "finish_reason": _ENDS.get(action.fault or "hang", {"type": action.finish}),
                "prompt_tokens": len(body["input_ids"]),
                "weight_version": self.version,
                "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
                "input_token_logprobs": [],
                "output_token_logprobs": [[lp, token, None] for lp, token in zip(logprobs, ids, strict=True)],
                "completion_tokens": len(ids),
                "cached_tokens": 0,
                "e2e_latency": 0.01,
                **action.meta,
            },
        }


@asynccontextmanager
async def scripted_engine(script: Script | None = None, port: int = 0) -> AsyncIterator[AnsweringEngine]:
    """Runs an engine on loopback, by default on a free port, while the context is entered."""
    engine = AnsweringEngine(script)
    async with engine.serving(port):
        try:
            yield engine
        finally:
            engine.released.set()
