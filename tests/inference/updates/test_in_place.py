"""weights.on_update = in_place: requests keep their slots and their KV while engines take new weights."""

from __future__ import annotations

import operator
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from asyncrl.data.staleness import step_of
from asyncrl.inference.sglang.engine_api import EngineApi
from asyncrl.rollout.requests.engine_clock import EngineClock
from asyncrl.rollout.requests.generate_client import GenerateClient as RolloutClient
from asyncrl.rollout.requests.generate_client import RequestOptions
from asyncrl.rollout.requests.retry import RetryPolicy
from asyncrl.rollout.requests.wire import Generation, SamplingParams
from tests.inference.conftest import StartFleet, in_the_middle
from tests.inference.transaction_rig import Rig, holds, rig, tensors_of
from tests.scripted import Latency, ScriptedEngine

pytestmark = pytest.mark.anyio

TOKENS = 120
GREEDY = SamplingParams(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)
PROMPT = msgspec.Raw(b"[1,2,3]")


class ClockedClient(RolloutClient):
    """A client that is told of pauses."""

    def __init__(self, router_url: str, options: RequestOptions) -> None:
        self.clock = EngineClock()
        super().__init__(router_url, options, clock=self.clock)


@asynccontextmanager
async def client_of(r: Rig, *, keeps_kv: bool = True) -> AsyncIterator[ClockedClient]:
    options = RequestOptions(
        vocab_size=1 << 20,
        timeout_s=10.0,
        retry=RetryPolicy(retries=0, patience_s=1.0),
        keeps_kv=keeps_kv,
    )
    async with ClockedClient(r.fleet.controller.router_url, options) as client:
        yield client


async def publish(r: Rig, client: ClockedClient, version: str) -> None:
    with client.held():
        client.clock.pause()
        await r.publish(version)
        client.published(version)
        client.clock.resume()


async def through_updates(r: Rig, client: ClockedClient, versions: list[str], requests: int) -> dict[str, Generation]:
    """Publishes `versions` in the middle of so many generations, more of which begin after each.

    Returns all of them by the id of their sample.
    """
    generations: dict[str, Generation] = {}

    async def one(number: int) -> None:
        sample_id = f"{number:08d}.000"
        generations[sample_id] = await client.generate(sample_id, PROMPT, GREEDY)

    async with anyio.create_task_group() as tasks:
        for turn, version in enumerate(versions):
            begun = (turn + 1) * requests
            async with in_the_middle(r.fleet.engines, lambda: begun - len(generations)) as stand:  # noqa: B023
                for number in range(turn * requests, begun):
                    tasks.start_soon(one, number)
                await stand()
                await publish(r, client, version)
    return generations


def makers(r: Rig) -> dict[str, list[str]]:
    return {rid: made for engine in r.fleet.engines for rid, made in engine.generation.makers.items()}


def sample_of(rid: str) -> str:
    """The sample whose only request has this id."""
    return rid.partition("-")[2].rpartition(".")[0]


def told_of(generation: Generation) -> list[str | None]:
    """By token, the version that is told to have made it."""
    return [span.version for span in generation.versions for _ in range(span.end - span.start)]


async def test_running_requests_go_on_where_they_were(start_fleet: StartFleet) -> None:
    async with rig(start_fleet, latency=Latency(token_s=0.004), on_update="in_place") as r, client_of(r) as client:
        await publish(r, client, "0.0")
        seen: list[tuple[str | None, int]] = []
        export = r.source.before_tensor

        def look(number: int) -> None:
            seen.extend((engine.generation.paused, engine.generation.running) for engine in r.fleet.engines)
            if export is not None:
                export(number)

        r.source.before_tensor = look
        generations = await through_updates(r, client, ["0.1", "0.2"], requests=8)
        assert all(paused == "in_place" for paused, _ in seen) and any(running for _, running in seen)
        assert [len(g.output_ids) for g in generations.values()] == [TOKENS] * 16
        assert any(len(g.versions) > 1 for g in generations.values())
        assert r.complaints() == []
        for engine in r.fleet.engines:
            assert all(not update["flush_cache"] for update in engine.updates)


async def test_no_token_counts_with_newer_weights_than_those_that_made_it(start_fleet: StartFleet) -> None:
    async with rig(start_fleet, latency=Latency(token_s=0.004), slots=4, on_update="in_place") as r:
        for keeps_kv in (True, False):
            async with client_of(r, keeps_kv=keeps_kv) as client:
                first, second, third = (f"0.{3 * keeps_kv + i}" for i in range(3))
                await publish(r, client, first)
                before = set(makers(r))
                generations = await through_updates(r, client, [second, third], requests=12)
                made = {sample_of(rid): truths for rid, truths in makers(r).items() if rid not in before}
            assert any(len(set(truths)) > 1 for truths in made.values()), "none was in the middle"
            pairs = [
                (step_of(told), step_of(true))
                for sample_id, g in generations.items()
                for told, true in zip(told_of(g), made.pop(sample_id), strict=True)
            ]
            assert not made
            newer, older = (sum(apart(*pair) for pair in pairs) for apart in (operator.gt, operator.lt))
            if keeps_kv:
                assert newer == 0
                assert older <= 2 * len(generations), "one token for each update at most"
            else:
                assert newer > 0, "the engine's own stamps are one token ahead of the truth"


async def test_what_begins_after_an_update_reuses_no_kv_of_older_weights(start_fleet: StartFleet) -> None:
    async with rig(start_fleet, engines=1, on_update="in_place") as r, client_of(r) as client:
        await publish(r, client, "0.0")
        old = await client.generate("00000000.000", PROMPT, GREEDY)
        await publish(r, client, "0.1")
        new = await client.generate("00000001.000", PROMPT, GREEDY)
        again = await client.generate("00000002.000", PROMPT, GREEDY)
        [engine] = r.fleet.engines
        async with fresh_engine("0.1") as fresh, EngineApi.open("fresh", fresh.url) as control:
            expected = await control.generate([1, 2, 3], max_new_tokens=TOKENS)
        assert tuple(new.output_ids) == tuple(again.output_ids) == expected.output_ids != tuple(old.output_ids)
        async with EngineApi.open("engine-0", engine.url) as control:
            [key] = [key for key, _ in engine.generation.cache if key.endswith("-0.0")]
            stale = await control.generate([1, 2, 3], max_new_tokens=TOKENS, extra_key=key)
        assert stale.output_ids != expected.output_ids, "the KV of 0.0 is still there"


@asynccontextmanager
async def fresh_engine(version: str) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(tensors_of(version))
    async with anyio.create_task_group() as tasks:
        await tasks.start(engine.run)
        yield engine
        engine.kill()


async def test_weights_by_disk_are_taken_in_place_too(start_fleet: StartFleet, tmp_path: Path) -> None:
    latency = Latency(token_s=0.004)
    async with (
        rig(start_fleet, latency=latency, disk=tmp_path / "transfer", on_update="in_place") as r,
        client_of(r) as client,
    ):
        await publish(r, client, "0.0")
        generations = await through_updates(r, client, ["0.1"], requests=4)
        assert [len(g.output_ids) for g in generations.values()] == [TOKENS] * 4
        assert all(holds(engine, tensors_of("0.1")) for engine in r.fleet.engines) and r.complaints() == []
