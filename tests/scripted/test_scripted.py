"""The scripted engine behaves as measured on the real engine. The fault tests rely on that."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import aiohttp
import anyio
import msgspec
import pytest

from asyncrl.errors import EngineError
from asyncrl.host import ProcessSpec
from asyncrl.inference.sglang.engine_api import EngineApi, EngineRequestError
from tests.inference.conftest import eventually
from tests.scripted import (
    Fault,
    Latency,
    ScriptedEngine,
    ScriptedHost,
    ScriptedRouter,
    die,
    drop,
    freeze,
    garbage,
    hang,
    refuse,
    slow,
    truncate,
)
from tests.scripted.faults import FaultBook

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
ENDLESS = 100_000
"""Number of tokens; no test waits for so many."""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(latency=Latency(token_s=0.01), slots=2)
    async with engine.serving():
        yield engine


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[EngineApi]:
    async with EngineApi.open("engine-0", engine.url) as client:
        yield client


async def some_tokens(engine: ScriptedEngine) -> None:
    await eventually(lambda: engine.generation.running > 0)
    await anyio.sleep(0.05)


async def undisturbed(tokens: int) -> tuple[int, ...]:
    """Returns the answer to the same prompt of an engine whose weights do not change."""
    engine = ScriptedEngine()
    async with engine.serving(), EngineApi.open("undisturbed", engine.url) as client:
        return (await client.generate([1, 2], max_new_tokens=tokens)).output_ids


def test_a_fault_meets_the_calls_that_it_names() -> None:
    book = FaultBook()
    second, forever = refuse("a", nth=2), refuse("b", times=None)
    book.add(second, forever)
    assert [book.next("a") for _ in range(3)] == [None, second, None]
    assert [book.next("b") for _ in range(3)] == [forever] * 3
    assert book.happened == [second, forever, forever, forever]


async def test_a_retract_pause_keeps_tokens_and_each_version_has_its_span(
    engine: ScriptedEngine, client: EngineApi
) -> None:
    answers = []

    async def ask() -> None:
        answers.append(await client.generate([1, 2], max_new_tokens=ENDLESS))

    async with anyio.create_task_group() as task_group:
        task_group.start_soon(ask)
        await some_tokens(engine)
        await client.pause("retract")
        made = engine.generation.running
        await client.set_version("1")
        await client.flush_cache()
        await client.resume()
        await some_tokens(engine)
        engine.generation.finish()
    meta, length = answers[0].meta_info, len(answers[0].output_ids)
    assert made == 0
    assert [run.version for run in meta.weight_versions] == ["default", "1"]
    assert (meta.weight_versions[0].start, meta.weight_versions[1].end) == (0, length)
    assert meta.weight_versions[0].end == meta.weight_versions[1].start > 0
    assert meta.weight_version == "1"


async def test_an_in_place_pause_refuses_the_flush_and_mixes_old_kv_into_the_log_probs(
    engine: ScriptedEngine, client: EngineApi
) -> None:
    answers = []

    async def ask() -> None:
        answers.append(await client.generate([1, 2], max_new_tokens=ENDLESS))

    async with anyio.create_task_group() as task_group:
        task_group.start_soon(ask)
        await some_tokens(engine)
        await client.pause("in_place")
        with pytest.raises(EngineRequestError, match="HTTP 400"):
            await client.flush_cache()
        engine.weights.reset()
        await client.resume()
        await some_tokens(engine)
        engine.generation.finish()
    given = answers[0].output_ids
    same = [a == b for a, b in zip(given, await undisturbed(len(given)), strict=True)]
    assert same[0] and not same[-1]


async def test_an_abort_goes_by_prefix_and_does_not_reach_requests_in_front_of_the_scheduler(
    engine: ScriptedEngine, client: EngineApi
) -> None:
    reasons: dict[str, str] = {}

    async def ask(rid: str) -> None:
        answer = await client.generate([1], max_new_tokens=ENDLESS, rid=rid)
        assert answer.meta_info.finish_reason is not None
        reasons[rid] = answer.meta_info.finish_reason["type"]

    async with anyio.create_task_group() as task_group:
        for rid in ("pre-1", "pre-11", "other"):
            task_group.start_soon(ask, rid)
        await eventually(lambda: (engine.generation.running, engine.generation.waiting) == (2, 1))
        async with aiohttp.ClientSession() as session:
            await session.post(engine.url + "/abort_request", json={"rid": "pre-1"})
            await client.pause("retract")
            task_group.start_soon(ask, "late")
            await eventually(lambda: engine.calls.count("generate") == 4)
            await client.abort_all()
            await client.resume()
            await eventually(lambda: reasons.keys() == {"pre-1", "pre-11", "other"} and engine.generation.running == 1)
            engine.generation.finish()
    assert reasons == {"pre-1": "abort", "pre-11": "abort", "other": "abort", "late": "length"}


async def test_the_engine_refuses_what_the_real_one_refuses(engine: ScriptedEngine, client: EngineApi) -> None:
    for call in (client.end_weight_update(), client.destroy_weights_group("nobody")):
        with pytest.raises(EngineRequestError, match="HTTP 400"):
            await call
    await client.pause()
    await client.begin_weight_update()
    with pytest.raises(EngineRequestError, match="already open"):
        await client.begin_weight_update()
    await client.end_weight_update()
    await client.resume()
    with pytest.raises(EngineRequestError, match="HTTP 400"):
        await client.generate([])
    with pytest.raises(EngineRequestError, match="driver"):
        await client.check_weights("compare")


async def test_a_frozen_scheduler_answers_pings_only_and_holds_what_continue_needs(
    engine: ScriptedEngine, client: EngineApi
) -> None:
    await client.pause()
    engine.script(freeze("begin_weight_update"))
    for call in (client.begin_weight_update, client.resume, client.health_generate):
        with pytest.raises(EngineRequestError, match="no answer"):
            await call(timeout_s=0.05)
    await client.ping()
    assert (await client.model_info()).weight_version == "default"


@pytest.mark.parametrize("kill", ["release_memory", "an id outside the vocabulary", "die"])
async def test_what_kills_the_engine_resets_its_connections_and_tells_the_host(kill: str) -> None:
    engine = ScriptedEngine(vocab_size=100)
    async with ScriptedHost({"engine-0": engine}, ScriptedRouter()) as host:
        spec = ProcessSpec(name="engine-0", argv=("engine", "--host", "127.0.0.1", "--port", "0"))
        first = await host.spawn(spec)
        async with EngineApi.open("engine-0", engine.url) as client:
            await client.set_version("7")
            engine.script(*([die("generate")] if kill == "die" else []))
            with pytest.raises(EngineRequestError, match="no answer"):
                if kill == "release_memory":
                    await client.release_memory(None)
                else:
                    await client.generate([100])
        exited = await host.wait("engine-0")
        assert (exited.pid, exited.returncode) == (first, -9 if kill == "die" else -3)
        second = await host.spawn(spec)
        assert second != first and engine.version == "default"
        with pytest.raises(EngineError, match="is alive"):
            await host.spawn(spec)


@pytest.mark.parametrize(
    "fault",
    [drop("model_info", times=2), truncate("model_info", times=2), garbage("model_info")],
    ids=lambda fault: fault.kind,
)
async def test_answers_that_break_are_no_answers(engine: ScriptedEngine, client: EngineApi, fault: Fault) -> None:
    engine.script(fault)  # two times if the connection closes, because the client then sends a GET again
    with pytest.raises(EngineRequestError):
        await client.model_info()
    engine.faults.clear()
    await client.model_info()


async def test_an_engine_with_full_slots_is_healthy(engine: ScriptedEngine, client: EngineApi) -> None:
    async with anyio.create_task_group() as task_group:
        for _ in range(4):
            task_group.start_soon(partial(client.generate, [1], max_new_tokens=1000, timeout_s=30.0))
        await eventually(lambda: engine.generation.running == 2)
        await client.health_generate(timeout_s=5.0)
        await client.abort_all()


async def test_slow_and_hanging_answers_take_their_time(engine: ScriptedEngine, client: EngineApi) -> None:
    engine.script(slow("model_info", 0.2), hang("model_info", nth=2, seconds=0.2))
    for _ in range(2):
        began = anyio.current_time()
        await client.model_info()
        assert anyio.current_time() - began >= 0.2


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    command = [sys.executable, "-m", "tests.scripted", "--count", "3", "--token-s", "0.01"]
    faults = msgspec.json.encode([{"endpoint": "ping", "kind": "status", "status": 503}]).decode()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*command, "--faults", faults], cwd=ROOT, env=environment, stdout=-1, text=True) as popen:
        assert popen.stdout is not None
        assert select.select([popen.stdout], [], [], 60)[0]
        yield popen, cast(list[str], json.loads(popen.stdout.readline()))
        popen.kill()


async def test_engines_of_another_process_take_their_script_and_can_really_be_stopped_and_killed(
    process: tuple[subprocess.Popen[str], list[str]],
) -> None:
    popen, urls = process
    assert len(set(urls)) == 3
    async with EngineApi.open("engine-0", urls[0]) as client, aiohttp.ClientSession() as session:
        with pytest.raises(EngineRequestError, match="HTTP 503"):
            await client.ping()
        await client.ping()
        body = {"faults": [{"endpoint": "generate", "kind": "hang"}]}
        assert (await session.post(urls[0] + "/scripted/faults", json=body)).status == 200
        with pytest.raises(EngineRequestError, match="no answer"):
            await client.generate([1], timeout_s=0.1)
        await client.set_version("3")
        async with session.get(urls[0] + "/scripted/state") as response:
            assert (await response.json())["version"] == "3"
        popen.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineRequestError, match="no answer"):
            await client.ping(timeout_s=0.2)
        popen.send_signal(signal.SIGCONT)
        await client.ping()
        popen.kill()
        with pytest.raises(EngineRequestError, match="no answer"):
            while True:
                await client.ping()


async def test_one_loop_plays_a_hundred_engines() -> None:
    engines = [ScriptedEngine(latency=Latency(token_s=0.001, spread=0.5), seed=n) for n in range(100)]
    answers: list[bytes] = []
    async with anyio.create_task_group() as task_group:
        for engine in engines:
            await task_group.start(engine.run)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session, anyio.create_task_group() as requests:

            async def ask(url: str) -> None:
                body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 20}}
                async with session.post(url + "/generate", json=body) as response:
                    answers.append(await response.read())

            for engine in engines * 5:
                requests.start_soon(ask, engine.url)
        for engine in engines:
            engine.kill()
    assert len(answers) == 500
    assert all(len(msgspec.json.decode(answer)["output_ids"]) == 20 for answer in answers)
