"""Weights that change while the real engine generates: what it had sampled stays, and every span is of its version.

Requests go to the engine itself, where a stream shows each token as it is made; the truth is a transformers forward in
float32 over the whole sequence (teacher forcing), once for each set of weights.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.data.fleet import EngineState, read_stamp
from asyncrl.errors import EngineError, WeightUpdateError
from asyncrl.inference.sglang.engine_api import EngineApi
from asyncrl.weights.publication import PublicationLimits
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.transports.broadcast import BroadcastTransport
from tests.system.conftest import RealFleet
from tests.weights.fakes import ThreadSource

pytestmark = [pytest.mark.anyio, pytest.mark.system, pytest.mark.timeout(450)]

EXACT = 1e-4
"""nat; what engine and transformers may differ by in float32 (measured: 1.2e-5)."""
OTHER_WEIGHTS = 0.1
"""nat; what log-probs under the wrong weights miss by at least, in the mean."""
UNDER_WAY = 12
"""Tokens that a request has made when weights change under it."""
SMALL_BUCKET = 32 * 1024
"""Bytes; cuts the tiny model into several buckets, flattened ones and others."""


@dataclass
class Generation:
    """One request, its answer as far as it has come."""

    prompt: list[int]
    tokens: int
    temperature: float
    sent: anyio.Event = field(default_factory=anyio.Event)
    under_way: anyio.Event = field(default_factory=anyio.Event)
    """It has made `wanted` tokens."""
    wanted: int = UNDER_WAY
    answer: dict[str, Any] = field(default_factory=dict)
    extra_key: str | None = None

    @property
    def output(self) -> list[int]:
        return list(self.answer.get("output_ids", []))

    @property
    def spans(self) -> list[tuple[str, int, int]]:
        runs = self.answer["meta_info"]["weight_versions"]
        return [(read_stamp(run["version"])[0], run["start"], run["end"]) for run in runs]

    @property
    def logprobs(self) -> Tensor:
        """float32 [tokens]."""
        return torch.tensor([entry[0] for entry in self.answer["meta_info"]["output_token_logprobs"]])

    async def next_tokens(self, count: int) -> None:
        """Returns when `count` more tokens have come."""
        await self.until(len(self.output) + count)

    async def until(self, tokens: int) -> None:
        """Returns when it has so many tokens."""
        if len(self.output) < tokens:
            self.wanted, self.under_way = tokens, anyio.Event()
            await self.under_way.wait()

    async def run(self, url: str) -> None:
        body = {
            "input_ids": self.prompt,
            "sampling_params": {
                "max_new_tokens": self.tokens,
                "temperature": self.temperature,
                "ignore_eos": True,
            },
            "return_logprob": True,
            "stream": True,
        } | ({} if self.extra_key is None else {"extra_key": self.extra_key})

        async def on_sent(*_: object) -> None:
            self.sent.set()

        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(on_sent)
        async with (
            aiohttp.ClientSession(trace_configs=[trace]) as session,
            session.post(f"{url}/generate", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    self.answer = msgspec.json.decode(line[6:])
                    if len(self.output) >= self.wanted:
                        self.under_way.set()


def numbered_prompt(number: int, length: int) -> list[int]:
    return [3 + (7 * number + 5 * i) % 60 for i in range(length)]


def logprobs_of_transformers(model: Path, generation: Generation) -> Tensor:
    """float32 [tokens]: each sampled token given all before it, at the request's temperature."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.tensor([generation.prompt + generation.output])
    with torch.no_grad():
        logits = policy(ids).logits[0, len(generation.prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / generation.temperature, -1)
    return logprobs.gather(1, ids[0, len(generation.prompt) :, None])[:, 0]


async def check_spans(generation: Generation, models: dict[str, Path], versions: Sequence[str]) -> None:
    """Its spans cover every token once, in the order of publication, and hold the log-probs of their weights."""
    assert len(generation.output) == generation.tokens == len(generation.logprobs)
    spans = generation.spans
    assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
    assert spans[-1][2] == generation.tokens
    assert [version for version, _, _ in spans] == sorted((v for v, _, _ in spans), key=versions.index)
    assert len({version for version, _, _ in spans}) == len(spans)
    truth = {
        model: await anyio.to_thread.run_sync(logprobs_of_transformers, model, generation)
        for model in set(models.values())
    }
    for version, start, end in spans:
        assert end > start
        for model, logprobs in truth.items():
            difference = (generation.logprobs[start:end] - logprobs[start:end]).abs()
            if model == models[version]:
                assert difference.max() < EXACT, f"span {version}: {difference.max():.2e} nat from its own weights"
            elif end - start >= UNDER_WAY:
                assert difference.mean() > OTHER_WEIGHTS, f"span {version} also fits other weights"


async def on_transformers(model: Path, generation: Generation) -> list[int]:
    """What follows each token of the answer where the most likely one is taken."""

    def run() -> list[int]:
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        ids = torch.tensor([generation.prompt + generation.output])
        with torch.no_grad():
            logits = policy(ids).logits[0, len(generation.prompt) - 1 : -1]
        return [int(token) for token in logits.argmax(-1)]

    return await anyio.to_thread.run_sync(run)


@pytest.fixture
async def transport(serving_fleet: RealFleet) -> AsyncIterator[BroadcastTransport]:
    transport = BroadcastTransport(EngineApi.open, backend="gloo", bucket_bytes=SMALL_BUCKET, timeout_s=10.0)
    yield transport
    await transport.aclose()


@pytest.fixture
async def trainers(serving_fleet: RealFleet) -> AsyncIterator[tuple[ThreadSource, ThreadSource]]:
    """One that holds the first model and one that holds the second."""
    first, second = (ThreadSource(load_file(model / "model.safetensors")) for model in serving_fleet.models)
    yield first, second
    first.close()
    second.close()


def engine_url(fleet: RealFleet) -> str:
    return fleet.controller.fleet().engines[0].endpoint.url


async def greedy(fleet: RealFleet, prompt: Sequence[int], tokens: int = 16) -> Generation:
    generation = Generation(list(prompt), tokens, 1.0)
    body = {
        "input_ids": generation.prompt,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
    }
    async with aiohttp.ClientSession() as session, session.post(f"{engine_url(fleet)}/generate", json=body) as response:
        generation.answer = await response.json()
    return generation


def hold(source: ThreadSource, meanwhile: Callable[[], Awaitable[None]]) -> None:
    """Has `meanwhile` run in the event loop halfway through each export, and its trainer thread wait for that."""
    token = anyio.lowlevel.current_token()

    def before_tensor(number: int) -> None:
        if number == len(source.tensors) // 2:
            anyio.from_thread.run(meanwhile, token=token)

    source.before_tensor = before_tensor


async def publish_to(fleet: RealFleet, source: ThreadSource, transport: BroadcastTransport, version: str) -> None:
    limits = PublicationLimits(transfers=1)
    await Publisher(fleet.controller, source, transport, events=fleet.events, limits=limits).publish(version)


async def test_log_probs_of_every_span_are_those_of_its_weights_over_two_updates(
    serving_fleet: RealFleet, trainers: tuple[ThreadSource, ThreadSource], transport: BroadcastTransport
) -> None:
    fleet, url = serving_fleet, engine_url(serving_fleet)
    first, second = trainers
    versions = [str(fleet.controller.fleet().published_version), fleet.next_version(), fleet.next_version()]
    models = dict(zip(versions, (fleet.models[0], fleet.models[1], fleet.models[0]), strict=True))
    short = Generation(numbered_prompt(0, 9), UNDER_WAY, 1.0)
    running = [
        Generation(numbered_prompt(1 + i, length), tokens, temperature)
        for i, (length, tokens, temperature) in enumerate(
            [(3, 420, 1.0), (17, 440, 0.7), (40, 460, 1.3), (64, 400, 1.0), (1, 480, 1.0)]
        )
    ]
    queued = [Generation(numbered_prompt(9 + i, 20 + i), 30 + 10 * i, 1.0) for i in range(2)]

    with anyio.fail_after(60):
        await short.run(url)
        async with anyio.create_task_group() as requests:
            for generation in running:
                requests.start_soon(generation.run, url)
            for version, source, late in zip(versions[1:], (second, first), queued, strict=True):
                async with anyio.create_task_group() as waiters:
                    for generation in running:
                        waiters.start_soon(generation.next_tokens, UNDER_WAY)
                prefixes: list[list[int]] = []

                async def during_the_pause(late: Generation = late, prefixes: list[list[int]] = prefixes) -> None:
                    prefixes += [generation.output for generation in running]
                    requests.start_soon(late.run, url)
                    await late.sent.wait()

                hold(source, during_the_pause)
                await publish_to(fleet, source, transport, version)
                for generation, prefix in zip(running, prefixes, strict=True):
                    await generation.until(len(prefix) + 1)
                    assert len(prefix) >= UNDER_WAY and generation.output[: len(prefix)] == prefix

    assert [version for version, _, _ in short.spans] == versions[:1]
    assert all([version for version, _, _ in generation.spans] == versions for generation in running)
    assert [generation.spans[0][0] for generation in queued] == versions[1:], "it waited for the new weights"
    assert queued[1].spans == [(versions[2], 0, queued[1].tokens)]
    for generation in (short, *running, *queued):
        await check_spans(generation, models, versions)


async def test_the_same_prompt_after_an_update_reuses_nothing_and_has_other_log_probs(
    serving_fleet: RealFleet, trainers: tuple[ThreadSource, ThreadSource], transport: BroadcastTransport
) -> None:
    prompt = numbered_prompt(30, 50)
    before, again = [await greedy(serving_fleet, prompt) for _ in range(2)]
    version = serving_fleet.next_version()
    await publish_to(serving_fleet, trainers[1], transport, version)
    after, after_again = [await greedy(serving_fleet, prompt) for _ in range(2)]

    cached = [g.answer["meta_info"]["cached_tokens"] for g in (again, after, after_again)]
    assert cached == [len(prompt) - 1, 0, len(prompt) - 1]
    assert (before.logprobs - again.logprobs).abs().max() < EXACT
    assert before.output != after.output == after_again.output
    assert abs(float(before.logprobs[0] - after.logprobs[0])) > EXACT
    for generation in (after, after_again):
        await check_spans(generation, {version: serving_fleet.models[1]}, [version])


async def test_weights_that_were_reset_are_garbage_until_an_update_makes_them_those_of_a_load_from_disk(
    serving_fleet: RealFleet, trainers: tuple[ThreadSource, ThreadSource], transport: BroadcastTransport
) -> None:
    fleet, controller, prompt = serving_fleet, serving_fleet.controller, numbered_prompt(31, 24)
    assert len(fleet.loaded["engine-0"][0].checksums) > 10
    healthy = await greedy(fleet, prompt)
    await controller.check_weights("snapshot")
    await controller.check_weights("compare")

    await controller.check_weights("reset_tensors")
    with pytest.raises(EngineError, match=r"differ from the snapshot in engine-0: lm_head\.weight, .* and \d+ more"):
        await controller.check_weights("compare")
    garbage = await greedy(fleet, [*prompt[1:], 5])
    truth = logprobs_of_transformers(fleet.models[0], garbage)
    assert not (garbage.logprobs - truth).abs().mean() < OTHER_WEIGHTS  # not a number is garbage too

    await publish_to(fleet, trainers[0], transport, fleet.next_version())
    await controller.check_weights("compare")
    assert await controller.check_weights("checksum") == fleet.loaded
    assert (await greedy(fleet, prompt)).output == healthy.output

    await publish_to(fleet, trainers[1], transport, fleet.next_version())
    with pytest.raises(EngineError, match="differ from the snapshot in engine-0"):
        await controller.check_weights("compare")


async def test_a_tensor_name_that_the_engine_silently_ignores_fails_the_first_publication(
    serving_fleet: RealFleet, trainers: tuple[ThreadSource, ThreadSource], transport: BroadcastTransport
) -> None:
    fleet, controller = serving_fleet, serving_fleet.controller
    right = trainers[1]
    renamed = {name.replace("1.mlp.down_proj", "1.mlp.down"): tensor for name, tensor in right.tensors.items()}
    wrong = ThreadSource(renamed)

    # Without a proof the engine's word is taken, although one of its tensors is still that of the first model.
    await publish_to(fleet, wrong, transport, fleet.next_version())
    answer = await greedy(fleet, numbered_prompt(32, 24))
    assert answer.output != (await on_transformers(fleet.models[1], answer)), "the engine said success"

    lease = await controller.begin_weight_update(fleet.next_version())
    await controller.abort_weight_update(lease.lease_id, {})
    assert controller.fleet().engines[0].state is EngineState.PENDING_WEIGHTS  # as after a start: it holds no version
    with pytest.raises(WeightUpdateError, match=r"ignored model\.layers\.1\.mlp\.down_proj\.weight\. The export must"):
        await publish_to(fleet, wrong, transport, fleet.next_version())
    assert controller.fleet().engines[0].state is EngineState.PENDING_WEIGHTS
    wrong.close()

    await publish_to(fleet, right, transport, fleet.next_version())
    assert controller.fleet().engines[0].state is EngineState.SERVING
    answer = await greedy(fleet, numbered_prompt(32, 24))
    assert answer.output == await on_transformers(fleet.models[1], answer)
