"""The control calls to the router in front of the engines.

Invariants
- `add` returns when the router sends requests to the engine, `remove` when it sends no more.
- `probe` is a real generation through the router: a router is ready when it has answered one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp
import anyio
import msgspec

from asyncrl.data.fleet import read_stamp
from asyncrl.errors import EngineError
from asyncrl.inference.sglang.engine_api import ProbeAnswer
from asyncrl.observability.waits import waiting
from asyncrl.run_directory.engine_key import key_headers

T = TypeVar("T")

POLL_S = 0.05
WORKER_TIMEOUT_S = 60.0
"""The router looks a worker up before it lists it: 0.2 s measured on a quiet machine."""
LATE_S = 12.0
"""How long the router may take to list a worker (`worker_startup_timeout_secs`, and a little). It silently gives up a
worker that could not answer it for that long; it is told of the worker again."""
CALL_TIMEOUT_S = 10.0
REMOVAL_AGAIN_S = 1.0
"""A removal is carried out within 0.1 s; if it had no effect after this long, it is asked for again."""


class Worker(msgspec.Struct, frozen=True):
    """One entry of GET /workers."""

    id: str
    url: str
    is_healthy: bool
    status: str | None = None
    """smg only: `draining` for the 5 s in which it still lists a worker that gets no requests any more."""

    @property
    def leaving(self) -> bool:
        """Whether the router lists it for the last seconds, without sending it requests."""
        return self.status == "draining"


class _WorkerList(msgspec.Struct, frozen=True):
    workers: tuple[Worker, ...]


class RouterClient:
    """Control calls to the router at `url`; `metrics_url` is that of its figures for Prometheus, if known.

    `owner`: name of the job, which engines that outlive it bear in their stamps. `key`: that of the job, without which
    the router shows and changes no worker.
    """

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        metrics_url: str = "",
        owner: str | None = None,
        key: str | None = None,
    ) -> None:
        self._owner = owner
        self._headers = key_headers(key)
        self.url = url
        self.metrics_url = metrics_url
        self._session = session

    async def wait_answering(self, timeout_s: float) -> None:
        """Returns when the router's control plane answers; raises TimeoutError after `timeout_s`."""
        with waiting("first answer", "router", timeout_s):
            while True:
                try:
                    await self.workers()
                    return
                except EngineError:
                    await anyio.sleep(POLL_S)

    async def workers(self) -> tuple[Worker, ...]:
        """The workers that the router lists; raises EngineError."""
        status, raw = await self._call("GET", "/workers")
        if status != 200:
            raise EngineError(f"router: GET /workers: HTTP {status}: {raw[:300].decode(errors='replace')}")
        return _decode("GET /workers", raw, _WorkerList).workers

    async def add(self, url: str, timeout_s: float = WORKER_TIMEOUT_S) -> None:
        """Makes the engine at `url` a worker; returns when the router routes to it.

        Raises EngineError when the router refuses or does not answer, TimeoutError after `timeout_s`.
        """
        with waiting("worker registration", "router", timeout_s):
            # smg answers 409 while it lists an earlier worker of this url.
            await self._poll_workers(lambda workers: not any(w.url == url and w.leaving for w in workers))
            while True:
                status, raw = await self._call("POST", "/workers", {"url": url})
                if status not in (200, 202, 409):
                    detail = raw[:300].decode(errors="replace")
                    raise EngineError(f"router: worker {url} refused: HTTP {status}: {detail}")
                with anyio.move_on_after(LATE_S):
                    await self._poll_workers(
                        lambda workers: any(w.url == url and w.is_healthy and not w.leaving for w in workers)
                    )
                    return

    async def remove(self, url: str, timeout_s: float = WORKER_TIMEOUT_S) -> None:
        """Takes the engine at `url` out; requests that run in it go on. Raises as `add` does."""
        # The router registers in the background: one of two registrations may be carried out after a removal, and list
        # the engine anew. So the removal is repeated until the engine is not listed.
        told: dict[str, float] = {}
        with waiting("worker removal", "router", timeout_s):
            while listed := [w for w in await self.workers() if w.url == url and not w.leaving]:
                for worker in listed:
                    if time.monotonic() - told.get(worker.id, -math.inf) >= REMOVAL_AGAIN_S:
                        told[worker.id] = time.monotonic()
                        await self._call("DELETE", f"/workers/{worker.id}")
                await anyio.sleep(POLL_S)

    async def probe(self, version: str | None, timeout_s: float = WORKER_TIMEOUT_S) -> ProbeAnswer:
        """A generation through the router; raises EngineError unless it is answered, by `version` (None: any)."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}}
        status, raw = await self._call("POST", "/generate", body, timeout_s)
        if status != 200:
            raise EngineError(f"router: no generation: HTTP {status}: {raw[:300].decode(errors='replace')}")
        generation = _decode("POST /generate", raw, ProbeAnswer)
        stamp = read_stamp(generation.meta_info.weight_version, self._owner)[0]
        if version is not None and stamp != version:
            raise EngineError(f"router: a generation was made by weights {stamp!r} instead of {version!r}")
        return generation

    async def _poll_workers(self, satisfied: Callable[[tuple[Worker, ...]], bool]) -> None:
        while True:
            if satisfied(await self.workers()):
                return
            await anyio.sleep(POLL_S)

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> tuple[int, bytes]:
        if self._session.closed:
            raise EngineError(f"router: {method} {path}: the fleet has been disposed of")
        data = None if body is None else msgspec.json.encode(body)
        headers = {**self._headers, **({} if body is None else {"Content-Type": "application/json"})}
        try:
            with waiting(f"{method} {path.split('/')[1]}", "router", timeout_s):
                async with self._session.request(method, self.url + path, data=data, headers=headers) as response:
                    return response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"router: {method} {path}: {str(error) or type(error).__name__}") from error


def _decode(call: str, raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(f"router: {call}: {error}: {raw[:300].decode(errors='replace')}") from error
