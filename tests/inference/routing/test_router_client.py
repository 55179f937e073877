"""The client of a router that carries out late what it accepted."""

from __future__ import annotations

from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web

from asyncrl.inference.routing import router_client as router_module
from asyncrl.inference.routing.router_client import RouterClient
from tests.scripted import Fault, ScriptedEngine, ScriptedRouter


class LateRouter(ScriptedRouter):
    """Carries out the second of two registrations only after the removal of the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.removals = 0

    async def _remove(self, body: dict[str, Any], http: web.Request) -> web.Response:
        kept, self.removals = list(self.workers), self.removals + 1
        response = await super()._remove(body, http)
        if self.removals == 1:
            self.workers = kept
        return response


async def test_an_engine_that_is_listed_again_after_its_removal_is_removed_again() -> None:
    engine, router = ScriptedEngine(), LateRouter()
    async with aiohttp.ClientSession() as session, anyio.create_task_group() as group:
        await group.start(engine.run)
        await group.start(router.run)
        client = RouterClient(router.url, session)
        await client.add(engine.url, 10)
        await client.remove(engine.url, 10)
        assert await client.workers() == ()
        assert router.removals == 2
        engine.kill()
        router.kill()


async def test_a_router_that_gave_an_engine_up_as_it_could_not_answer_is_told_of_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_module, "LATE_S", 0.3)
    engine, router = ScriptedEngine(), ScriptedRouter()
    engine.faults.add(Fault("ping", "status", status=503))
    async with aiohttp.ClientSession() as session, anyio.create_task_group() as group:
        await group.start(engine.run)
        await group.start(router.run)
        await RouterClient(router.url, session).add(engine.url, 30)
        assert router.workers == [engine.url]
        assert router.calls.count("add_worker") == 2
        engine.kill()
        router.kill()
