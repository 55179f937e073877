"""What the real router does to requests when engines are busy, silent, restarted or gone, with our settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import anyio
import pytest

from asyncrl.config.checks.router_args import MODULES
from asyncrl.errors import EngineError
from tests.inference.router_rig import RealRouter, StandIn, eventually, real_router, stand_in

StartRouter = Callable[..., AbstractAsyncContextManager[RealRouter]]

WATCHFUL = {"health_interval_s": 1, "health_failures": 1, "args": {"health_check_timeout_secs": 1}}
"""A silent engine is noticed within 2 s instead of 20."""

NO_ENGINE = {"sglang-router": 503, "smg": 404}
"""The answer of a router that knows no engine; `rollout` waits both out."""


@pytest.fixture(params=MODULES)
def start_router(request: pytest.FixtureRequest, tmp_path: Path) -> StartRouter:
    """Both routers keep the same promises."""
    return partial(real_router, tmp_path, package=request.param)


@asynccontextmanager
async def stand_ins(count: int) -> AsyncIterator[list[StandIn]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(stand_in()) for _ in range(count)]


async def test_it_answers_from_the_first_request_after_an_engine_was_added(start_router: StartRouter) -> None:
    async with stand_ins(2) as engines, start_router() as router:
        assert await router.generate() == NO_ENGINE[router.config.package]
        await router.add(*engines)
        assert Counter(await router.burst(100)) == {200: 100}
        assert [len(engine.served) for engine in engines] == [50, 50]


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_what_a_healthy_engine_refuses_opens_no_circuit(start_router: StartRouter, status: int) -> None:
    async with stand_ins(2) as engines, start_router() as router:
        await router.add(*engines)
        for engine in engines:
            engine.status = status
        # 20 in a row and a burst, each twice the ten failures after which a circuit opens by default.
        assert await router.sequence(20) == [status] * 20
        assert Counter(await router.burst(40)) == {status: 40}
        for engine in engines:
            engine.status = 200
        assert Counter(await router.burst(20)) == {200: 20}
        assert [len(engine.served) for engine in engines] == [10, 10]


async def test_a_circuit_is_there_for_those_who_ask_for_one(start_router: StartRouter) -> None:
    async with stand_ins(1) as [engine], start_router(breaker_failures=5) as router:
        await router.add(engine)
        engine.status = 500
        assert await router.sequence(7) == [500] * 5 + [503] * 2
        engine.status = 200
        assert await router.generate() == 503


async def test_engines_that_were_all_silent_get_traffic_again_by_themselves(start_router: StartRouter) -> None:
    async with stand_ins(2) as engines, start_router(**WATCHFUL) as router:
        await router.add(*engines)
        for engine in engines:
            engine.silent = True

        async def all_given_up() -> bool:
            return not any(worker.is_healthy for worker in await router.client.workers())

        async def both_serve() -> bool:
            return await router.generate() == 200 and all(engine.served for engine in engines)

        await eventually(all_given_up, 20)
        assert await router.generate() == 503
        for engine in engines:
            engine.silent = False
        await eventually(both_serve, 20)


async def test_a_paused_engine_is_not_dead(start_router: StartRouter) -> None:
    async with stand_ins(1) as [engine], start_router(health_interval_s=1, health_failures=1) as router:
        await router.add(engine)
        engine.hold()
        async with router.requests(8) as early:
            await engine.until_running(8)
            before = engine.looks

            async def looked_at() -> bool:
                return engine.looks >= before + 2  # one look in vain would do

            await eventually(looked_at, 20)
            async with router.requests(1) as late:
                await engine.until_running(9)
                engine.release()
        assert early + late == [200] * 9


async def test_an_engine_serves_again_on_its_port_each_time_it_comes_back(start_router: StartRouter) -> None:
    async with stand_ins(1) as [other], start_router() as router:
        await router.add(other)
        port = 0
        for _ in range(5):
            async with stand_in(port) as engine:
                port = int(engine.url.rpartition(":")[2])
                await router.add(engine)
                assert Counter(await router.burst(10)) == {200: 10}
                assert len(engine.served) == 5
                await router.client.remove(engine.url)
        assert Counter(await router.burst(10)) == {200: 10}


async def test_removal_lets_running_requests_end_and_sends_no_more(start_router: StartRouter) -> None:
    async with stand_ins(2) as [leaving, staying], start_router() as router:
        await router.add(leaving, staying)
        leaving.hold()
        async with router.requests(12) as statuses:
            await leaving.until_running(6)
            with anyio.fail_after(10):  # its requests do not end before they are let
                await router.client.remove(leaving.url)
            assert Counter(await router.burst(10)) == {200: 10}
            assert leaving.running == 6
            leaving.release()
        assert statuses == [200] * 12
        assert (len(leaving.served), len(staying.served)) == (6, 16)


async def test_an_engine_that_dies_costs_its_own_requests_only_and_they_fail_at_once(start_router: StartRouter) -> None:
    async with stand_ins(2) as [dying, staying], start_router() as router:
        await router.add(dying, staying)
        dying.hold()
        dying.drops = True
        with anyio.fail_after(20):  # else at the deadline of their client
            async with router.requests(12) as statuses:
                await dying.until_running(6)
                dying.release()
        assert statuses.count(200) == len(staying.served) == 6
        assert all(status in (500, 502) for status in statuses if status != 200)


async def test_a_router_that_is_killed_breaks_its_connections_and_can_start_again_on_its_port(
    start_router: StartRouter,
) -> None:
    async with stand_ins(2) as engines, start_router() as router:
        await router.add(*engines)
        for engine in engines:
            engine.hold()

        async def request() -> None:
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await router.generate()

        with anyio.fail_after(20):  # else at the deadline of their client
            async with anyio.create_task_group() as group:
                for _ in range(6):
                    group.start_soon(request)
                for engine in engines:
                    await engine.until_running(3)
                await router.kill()
        with pytest.raises(aiohttp.ClientConnectorError):
            await router.generate()
        with pytest.raises(EngineError, match="router: GET /workers"):
            await router.client.workers()
        await router.start_again()
        assert await router.client.workers() == ()
        for engine in engines:
            engine.release()
        await router.add(*engines)
        assert Counter(await router.burst(20)) == {200: 20}


async def test_an_engine_that_is_told_twice_or_comes_back_at_once_is_known_once(start_router: StartRouter) -> None:
    async with stand_ins(1) as [engine], start_router() as router:
        await router.add(engine, engine)
        assert len(await router.client.workers()) == 1
        await router.client.remove(engine.url)
        await router.add(engine)
        assert Counter(await router.burst(10)) == {200: 10}


async def test_metrics_are_served_where_the_log_says(start_router: StartRouter) -> None:
    async with stand_ins(1) as [engine], start_router() as router:
        await router.add(engine)
        await router.burst(3)
        url = f"http://127.0.0.1:{router.prometheus_port}/metrics"
        assert f"metrics on {url}" in router.log.read_text()
        async with router.session.get(url) as response:
            assert "smg_" in await response.text()


async def test_arguments_are_passed_through_to_the_router(start_router: StartRouter) -> None:
    async with stand_ins(1) as [engine], start_router(args={"max_concurrent_requests": 2, "queue_size": 0}) as router:
        await router.add(engine)
        engine.hold()
        async with router.requests(5) as statuses:
            await engine.until_running(2)

            async def others_refused() -> bool:
                return statuses == [429] * 3

            await eventually(others_refused, 20)
            engine.release()
        assert statuses == [429] * 3 + [200] * 2
