"""Routing keys: what belongs together meets one engine, through the real router and the client of the rollouts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import anyio
import msgspec
import pytest

from asyncrl.config.checks.router_args import MODULES
from asyncrl.data.fleet import ROUTING_KEY_HEADER, routing_key
from asyncrl.rollout.group_events import RequestFailed
from asyncrl.rollout.requests.generate_client import GenerateClient, GenerationFailed, RequestOptions, Unobserved
from asyncrl.rollout.requests.retry import RequestFault, RetryPolicy
from asyncrl.rollout.requests.wire import SamplingParams
from tests.inference.router_rig import RealRouter, StandIn, real_router, stand_in

PROMPT, SAMPLING = msgspec.Raw(b"[1]"), SamplingParams(max_new_tokens=8, temperature=1.0)
GROUPS = [f"{index:08d}" for index in range(24)]


@pytest.fixture(params=MODULES)
def package(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def fleet(
    log_dir: Path, package: str, engines: int, assignment: str = "min_load"
) -> AsyncIterator[tuple[RealRouter, list[StandIn]]]:
    async with AsyncExitStack() as stack:
        running = [await stack.enter_async_context(stand_in()) for _ in range(engines)]
        start = real_router(log_dir, package=package, policy="manual", sticky="group", assignment=assignment)
        yield await stack.enter_async_context(start), running


@dataclass
class Heard(Unobserved):
    """Notes which attempts failed."""

    failures: list[RequestFailed]

    def failed(self, failure: RequestFailed) -> None:
        self.failures.append(failure)


def client_of(
    url: str, sticky: Literal["off", "group", "sample"], failures: list[RequestFailed] | None = None
) -> GenerateClient:
    options = RequestOptions(
        vocab_size=8,
        timeout_s=10,
        retry=RetryPolicy(retries=2, patience_s=10, first_delay_s=0.01),
        sticky=sticky,
    )
    return GenerateClient(url, options, observer=Heard(failures if failures is not None else []))


def without_nonce(key: str) -> str:
    """The group or sample that a routing key stands for, whichever client sent it."""
    return key.partition("-")[2]


async def place(router: RealRouter, engines: Iterable[StandIn], keys: Iterable[str]) -> dict[str, StandIn]:
    """Which engine each key meets."""
    met: dict[str, StandIn] = {}
    for key in keys:
        assert await router.generate(key=key) == 200
        [met[key]] = [engine for engine in engines if engine.keys and engine.keys[-1] == key]
        for engine in engines:
            engine.keys.clear()
    return met


async def test_a_key_stays_with_its_engine_when_others_come_and_go(tmp_path: Path, package: str) -> None:
    async with fleet(tmp_path, package, 3, "random") as (router, [first, second, third]):
        engines = [first, second, third]
        await router.add(first, second)
        placed = await place(router, engines, GROUPS)
        assert set(placed.values()) == {first, second}
        assert await place(router, engines, GROUPS) == placed
        await router.add(third)
        assert await place(router, engines, GROUPS) == placed
        await router.client.remove(first.url)
        moved = await place(router, engines, GROUPS)
        assert {key for key in GROUPS if moved[key] is not placed[key]} == {k for k in GROUPS if placed[k] is first}
        assert await place(router, engines, GROUPS) == moved


async def test_a_new_key_goes_to_the_engine_with_the_fewest_requests(tmp_path: Path, package: str) -> None:
    async with fleet(tmp_path, package, 2) as (router, engines):
        await router.add(*engines)
        for engine in engines:
            engine.hold()
        async with router.requests(20, key="busy"):
            while not any(engine.running for engine in engines):
                await anyio.lowlevel.checkpoint()
            [busy] = [engine for engine in engines if engine.running]
            [idle] = [engine for engine in engines if engine is not busy]
            await busy.until_running(20)
            idle.release()
            assert set((await place(router, engines, GROUPS)).values()) == {idle}
            busy.release()


async def test_the_samples_of_a_group_share_an_engine_and_so_do_the_attempts_of_a_sample(
    tmp_path: Path, package: str
) -> None:
    async with fleet(tmp_path, package, 2) as (router, engines):
        await router.add(*engines)
        async with client_of(router.client.url, "group") as client, anyio.create_task_group() as task_group:
            for group in GROUPS:
                for index in range(4):
                    task_group.start_soon(client.generate, f"{group}.{index:03d}", PROMPT, SAMPLING)
        for engine in engines:
            assert all(engine.keys.count(key) == 4 for key in engine.keys)
        assert {without_nonce(key) for engine in engines for key in engine.keys} == set(GROUPS)
        assert all(engine.keys for engine in engines)


async def test_a_sample_whose_engine_left_goes_on_elsewhere(tmp_path: Path, package: str) -> None:
    async with fleet(tmp_path, package, 2) as (router, engines):
        await router.add(*engines)
        failures: list[RequestFailed] = []
        async with client_of(router.client.url, "sample", failures) as client:
            await client.generate("00000000.000", PROMPT, SAMPLING)
            [home] = [engine for engine in engines if engine.keys]
            [other] = [engine for engine in engines if not engine.keys]
            await client.generate("00000000.000", PROMPT, SAMPLING)
            await router.client.remove(home.url)
            await client.generate("00000000.000", PROMPT, SAMPLING)
        assert [without_nonce(key) for key in home.keys] == ["00000000.000"] * 2
        assert other.keys == home.keys[:1]
        assert failures == []


async def test_a_request_without_an_engine_is_waited_out(tmp_path: Path, package: str) -> None:
    async with fleet(tmp_path, package, 1) as (router, [engine]):
        failures: list[RequestFailed] = []
        async with client_of(router.client.url, "off", failures) as client, anyio.create_task_group() as task_group:
            task_group.start_soon(client.generate, "00000000.000", PROMPT, SAMPLING)
            with anyio.fail_after(5):
                while not failures:
                    await anyio.lowlevel.checkpoint()
            await router.add(engine)
        assert {failure.failure for failure in failures} == {RequestFault.BUSY}
        assert engine.keys == [None]


async def test_smgs_word_for_no_engine_is_waited_out_and_a_404_of_an_engine_is_not() -> None:
    failures: list[RequestFailed] = []
    async with stand_in() as router, client_of(router.url, "off", failures) as client:
        router.status = 404
        with pytest.raises(GenerationFailed):
            await client.generate("00000000.000", PROMPT, SAMPLING)
        router.error_code = "model_not_found"
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(client.generate, "00000000.001", PROMPT, SAMPLING)
            with anyio.fail_after(5):
                while len(failures) < 3:
                    await anyio.lowlevel.checkpoint()
            router.status = 200
    kinds = [failure.failure for failure in failures]
    assert kinds[0] is RequestFault.REFUSED
    assert set(kinds[1:]) == {RequestFault.BUSY}


def test_keys_are_those_of_groups_and_samples() -> None:
    assert ROUTING_KEY_HEADER == "X-SMG-Routing-Key"
    assert routing_key("off", "00000001.002") is None
    assert routing_key("group", "00000001.002") == "00000001"
    assert routing_key("group", "e0000001.0000003.002") == "e0000001.0000003"
    assert routing_key("sample", "00000001.002") == "00000001.002"
