"""The real router in front of the real engine: what it must not mistake for an engine's death."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import aiohttp
import anyio
import msgspec
import numpy as np
import pytest

from asyncrl.data.fleet import ROUTING_KEY_HEADER
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.inference.sglang.engine_api import EngineApi
from asyncrl.rollout.requests.answers import Asked, decode_answer
from asyncrl.rollout.requests.generate_client import GenerateClient, RequestOptions
from asyncrl.rollout.requests.retry import RetryPolicy
from asyncrl.rollout.requests.wire import SamplingParams, encode_prompt, encode_request
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
            asked = Asked(f"text-{index:03d}", sampling, tokenizer.vocab_size)
            body = encode_request(asked.rid, prompt, sampling)
            async with session.post(url + "/generate", data=body, headers=JSON) as response:
                answer = decode_answer(response.status, await response.read(), asked)
            assert answer.engine == "engine-0"
            named = len(SPECIAL) + len(CHARACTERS)  # the engine reads an id without a token as id 0
            assert answer.text == tokenizer.decode(np.where(answer.output_ids < named, answer.output_ids, 0))
            texts.append(answer.text)
    assert any("<bos>" in text or "<|end|>" in text for text in texts) and not any("<eos>" in text for text in texts)


async def test_a_stop_string_of_several_tokens_ends_a_response_with_exact_ids_and_logprobs(
    serving_fleet: RealFleet,
) -> None:
    tokenizer = PolicyTokenizer.load(serving_fleet.models[0])
    options = RequestOptions(
        vocab_size=tokenizer.vocab_size,
        timeout_s=60.0,
        retry=RetryPolicy(0, 5.0),
        detokenize=tokenizer.decode,
    )
    greedy = SamplingParams(max_new_tokens=48, temperature=0.0, stop_token_ids=tokenizer.stop_token_ids)
    ended = 0
    async with GenerateClient(serving_fleet.controller.router_url, options) as client:
        for index in range(24):
            prompt = encode_prompt(np.array([1, 5 + index, 9], np.int32), tokenizer.vocab_size)
            free = await client.generate(f"0000000{index}.000", prompt, greedy)
            spelled = [tokenizer.decode(free.output_ids[i : i + 1]) for i in range(len(free.output_ids))]
            known = (len(SPECIAL) <= free.output_ids) & (free.output_ids < len(SPECIAL) + len(CHARACTERS))
            places = [i for i in range(3, len(spelled) - 3) if known[i : i + 3].all()]
            if not places:
                continue
            stop = "".join(spelled[places[0] : places[0] + 3])
            count = next(n for n in range(1, len(spelled) + 1) if stop in "".join(spelled[:n]))
            assert tokenizer.token_of(stop) is None
            short = await client.generate(f"0000000{index}.001", prompt, replace(greedy, stop=(stop,)))
            assert short.output_ids.tolist() == free.output_ids[:count].tolist() and short.finish_reason == "stop"
            assert np.abs(short.logprobs - free.logprobs[:count]).max() < 1e-4
            assert short.text.endswith(stop) and short.versions[-1].end == count
            ended += count < len(free.output_ids)
    assert ended >= 3, "responses were cut short by their stop strings"
