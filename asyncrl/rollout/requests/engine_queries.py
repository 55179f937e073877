"""EngineQueries: calls of the rollout side to engines themselves: end these requests; how busy are you?

The router forwards neither, so these calls ask the router for its engines and then go to each of them.

Invariants
- An HTTP session of its own: no call here ever queues behind generation, however many requests are in flight.
- Every call is bounded. An engine that does not answer costs the other engines nothing, and raises nothing.
- While the router is down, calls go to the engines that it named last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import aiohttp
import anyio
import anyio.to_thread
import msgspec

from asyncrl.observability.waits import waiting
from asyncrl.run_directory.engine_key import key_headers, read_key
from asyncrl.tasks import run_all

_CALL_TIMEOUT_S = 3.0
"""Longest wait for one answer; measured below 30 ms, also on an engine that is paused."""
_PER_ENGINE = 8
"""Most calls to one engine at once."""
_KEEPALIVE_S = 4.0  # below the 5 s after which an engine closes an idle connection
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy one engine is."""

    running: int
    """Requests that it decodes."""
    waiting: int
    """Requests in its queue, including requests that lost their KV again for want of memory."""
    token_usage: float
    """Fraction of its KV pool that requests hold."""


@dataclass(slots=True)
class AbortProgress:
    """How far `EngineQueries.abort` has come."""

    engines: int = 0
    """Engines that the router knows."""
    heard: int = 0
    """Engines that took all ids."""


class _Worker(msgspec.Struct):
    url: str


class _Workers(msgspec.Struct):
    workers: list[_Worker]


class _Load(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float = 0.0


class _Loads(msgspec.Struct):
    loads: list[_Load]


class EngineQueries:
    """Construct it in the event loop; `aclose` it."""

    def __init__(self, router_url: str, key: Path | None = None, external: Collection[str] = ()) -> None:
        """`key`: file with the job's key. `external`: urls of the engines that know no key."""
        self._key_file = key
        self._key_read: str | None = None
        self._external = frozenset(external)
        self._router_url = router_url.rstrip("/")
        self._engines: tuple[str, ...] = ()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=_PER_ENGINE, keepalive_timeout=_KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CALL_TIMEOUT_S),
        )

    async def aclose(self) -> None:
        """Closes the connections. Idempotent."""
        await self._session.close()

    @property
    def known(self) -> int:
        """How many engines the router named when it answered last."""
        return len(self._engines)

    async def engines(self) -> tuple[str, ...]:
        """Urls of the engines that the router knows, or knew when it answered last."""
        raw = await self._call("GET", self._router_url, "/workers", headers=key_headers(await self._key()))
        if (found := _decode(raw, _Workers)) is not None:
            self._engines = tuple(worker.url.rstrip("/") for worker in found.workers)
        return self._engines

    async def abort(self, rids: Sequence[str], progress: AbortProgress) -> None:
        """Ends the requests of these ids wherever they run; `progress` is kept true, also when this is cancelled.

        An engine that does not know an id ignores it. An engine that does not answer gets no further ids.
        """
        engines = await self.engines()
        progress.engines = len(engines)

        key = await self._key()

        async def one(engine: str) -> None:
            silent = False
            headers = {} if engine in self._external else key_headers(key)

            async def worker() -> None:
                nonlocal silent
                while left and not silent:
                    body = {"rid": left.pop()}
                    silent = await self._call("POST", engine, "/abort_request", body, headers) is None or silent

            left = list(reversed(rids))
            async with anyio.create_task_group() as workers:
                for _ in range(min(_PER_ENGINE, len(rids))):
                    workers.start_soon(worker)
            progress.heard += not silent

        await run_all(*(partial(one, engine) for engine in engines))

    async def loads(self) -> tuple[EngineLoad, ...]:
        """The load of each engine that answers."""
        calls = [partial(self._load, engine) for engine in await self.engines()]
        return tuple(load for load in await run_all(*calls) if load is not None)

    async def _load(self, engine: str) -> EngineLoad | None:
        found = _decode(await self._call("GET", engine, "/v1/loads?include=core"), _Loads)
        if found is None or not found.loads:
            return None
        return EngineLoad(
            running=sum(load.num_running_reqs for load in found.loads),
            waiting=sum(load.num_waiting_reqs for load in found.loads),
            token_usage=max(load.token_usage for load in found.loads),
        )

    async def _key(self) -> str | None:
        if self._key_read is None and self._key_file is not None:
            self._key_read = await anyio.to_thread.run_sync(read_key, self._key_file)
        return self._key_read

    async def _call(
        self,
        method: str,
        url: str,
        path: str,
        body: dict[str, Any] | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> bytes | None:
        """The body of a good answer, else None, as after `aclose`."""
        if self._session.closed:  # by whoever cancelled this task, which was about to run
            return None
        data = None if body is None else msgspec.json.encode(body)
        headers = {**headers, **({} if body is None else {"Content-Type": "application/json"})}
        try:
            with waiting(path.partition("?")[0].lstrip("/"), url, _CALL_TIMEOUT_S):
                async with self._session.request(method, url + path, data=data, headers=headers) as response:
                    raw = await response.read()
                    return raw if response.status == 200 else None
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return None


def _decode(raw: bytes | None, kind: type[T]) -> T | None:
    try:
        return None if raw is None else msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
