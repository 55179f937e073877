"""The real router in front of the real engine: what it must not mistake for an engine's death."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import aiohttp
import anyio
import msgspec
import numpy as np
import pytest

from asyncrl.data.fleet import ROUTING_KEY_HEADER
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.inference.sglang.engine_api import EngineApi
from asyncrl.rollout.requests.wire import SamplingParams, decode_answer, encode_prompt, encode_request
from tests.inference.router_rig import real_router
from tests.system.conftest import RealFleet
from tests.tiny_policy import CHARACTERS, SPECIAL

pytestmark = pytest.mark.system
JSON = {"Content-Type": "application/json"}


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


async def test_special_tokens_stay_in_the_text_of_a_response_and_only_its_end_is_cut(serving_fleet: RealFleet) -> None:
    tokenizer = PolicyTokenizer.load(serving_fleet.models[0])
    sampling = SamplingParams(max_new_tokens=24, temperature=1.0, stop_token_ids=tokenizer.stop_token_ids)
    url, texts = serving_fleet.controller.router_url, []
    async with aiohttp.ClientSession() as session:
        for index in range(24):
            prompt = encode_prompt(np.array([1, 5 + index, 9], np.int32), tokenizer.vocab_size)
            body = encode_request(f"text-{index:03d}", prompt, sampling.encode())
            async with session.post(url + "/generate", data=body, headers=JSON) as response:
                answer = decode_answer(response.status, await response.read(), tokenizer.vocab_size)
            named = len(SPECIAL) + len(CHARACTERS)  # the engine reads an id without a token as id 0
            assert answer.text == tokenizer.decode(np.where(answer.output_ids < named, answer.output_ids, 0))
            texts.append(answer.text)
    assert any("<bos>" in text or "<|end|>" in text for text in texts) and not any("<eos>" in text for text in texts)
