"""The real router in front of the real engine: what it must not mistake for an engine's death."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import aiohttp
import anyio
import msgspec
import pytest

from asyncrl.data.fleet import ROUTING_KEY_HEADER
from asyncrl.inference.sglang.engine_api import EngineApi
from tests.inference.router_rig import real_router
from tests.system.conftest import RealFleet

pytestmark = pytest.mark.system


async def generate(url: str, prompt: list[int], rid: str, key: str | None = None) -> tuple[int, bytes]:
    body = {"input_ids": prompt, "rid": rid, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    headers = {} if key is None else {ROUTING_KEY_HEADER: key}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/generate", json=body, headers=headers) as response,
    ):
        return response.status, await response.read()


async def test_over_long_prompts_cost_nobody_else_anything(serving_fleet: RealFleet) -> None:
    url = serving_fleet.controller.router_url
    statuses = Counter([(await generate(url, [1] * 50_000, f"long-{index:03d}"))[0] for index in range(20)])
    assert statuses == {400: 20}
    statuses.clear()

    async def one(index: int) -> None:
        statuses[(await generate(url, [1, 2, 3], f"fair-{index:03d}"))[0]] += 1

    async with anyio.create_task_group() as group:
        for index in range(100):
            group.start_soon(one, index)
    assert statuses == {200: 100}


async def test_a_paused_engine_keeps_its_place_and_a_routing_key_means_nothing_to_it(
    serving_fleet: RealFleet, tmp_path: Path
) -> None:
    [status] = serving_fleet.controller.fleet().engines
    engine = status.endpoint
    watchful = {"health_interval_s": 1, "health_failures": 1, "args": {"health_check_timeout_secs": 2}}
    async with (
        real_router(tmp_path, policy="manual", sticky="group", **watchful) as router,
        EngineApi.open(engine.engine_id, engine.url) as client,
    ):
        await router.client.add(engine.url)
        answers: list[tuple[int, bytes]] = []

        async def request(rid: str) -> None:
            answers.append(await generate(router.client.url, [1, 2, 3], rid, key="group"))

        await client.pause()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(request, "early")
                await anyio.sleep(4)  # two looks at its health, of which one in vain would do
                assert [worker.is_healthy for worker in await router.client.workers()] == [True]
                group.start_soon(request, "late")
                await anyio.sleep(0.2)
                assert answers == []
                await client.resume()
        finally:
            await client.resume()
        assert [status for status, _ in answers] == [200, 200]
        assert {msgspec.json.decode(body)["meta_info"]["id"] for _, body in answers} == {"early", "late"}
