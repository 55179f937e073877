"""A scripted router: it knows workers by URL, sends requests to them in turn, and never retries."""

from __future__ import annotations

from typing import Any

import aiohttp
from aiohttp import web

from tests.scripted.server import Handler, ScriptedServer, answer

PING_TIMEOUT_S = 8.0
"""Time within which a new worker must answer a ping."""


class ScriptedRouter(ScriptedServer):
    """A router. Its endpoints for faults are `workers` (the list), `add_worker`, `remove_worker` and `generate`."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: list[str] = []
        """URLs of the workers that it knows."""
        self._turn = 0

    def fresh_memory(self) -> None:
        """Forgets all workers."""
        self.workers = []

    def handlers(self) -> dict[str, Handler]:
        """The endpoints that the job uses."""
        return {
            "workers": self._list,
            "add_worker": self._add,
            "remove_worker": self._remove,
            "generate": self._generate,
            "health": self._health,
        }

    def endpoint(self, http: web.Request) -> str:
        """Gives the methods of `workers` names of their own."""
        path = super().endpoint(http)
        if path == "workers" and http.method == "POST":
            return "add_worker"
        return "remove_worker" if path.startswith("workers/") and http.method == "DELETE" else path

    async def _health(self, body: dict[str, Any], http: web.Request) -> web.Response:
        return web.Response()

    async def _list(self, body: dict[str, Any], http: web.Request) -> web.Response:
        entries = [{"id": _id(url), "url": url, "is_healthy": True, "load": 0} for url in self.workers]
        return answer(workers=entries, total=len(entries))

    async def _add(self, body: dict[str, Any], http: web.Request) -> web.Response:
        """Accepts every worker, and lists it only if it answers a ping."""
        url = body["url"]
        # The second look is for a worker that was added twice at the same time.
        if url not in self.workers and await _pings(url) and url not in self.workers:
            self.workers.append(url)
        return answer(202, status="accepted", worker_id=_id(url))

    async def _remove(self, body: dict[str, Any], http: web.Request) -> web.Response:
        self.workers = [url for url in self.workers if _id(url) != http.path.rpartition("/")[2]]
        return answer(202, status="accepted")

    async def _generate(self, body: dict[str, Any], http: web.Request) -> web.Response:
        if not self.workers:
            return answer(503, error={"message": "no available workers"})
        self._turn += 1
        url = self.workers[self._turn % len(self.workers)]
        try:
            async with aiohttp.ClientSession() as session, session.post(url + "/generate", json=body) as response:
                return web.Response(body=await response.read(), status=response.status, content_type="application/json")
        except aiohttp.ClientError as problem:
            return answer(500, error={"message": f"call_upstream_request_error: {problem}"})


def _id(url: str) -> str:
    return url.rpartition(":")[2]


async def _pings(url: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=PING_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url + "/ping") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
