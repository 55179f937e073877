"""Failures that systems of this kind are known for, provoked on scripted engines: each a behaviour of ours.

Others of the kind stand where they belong. An engine that answers and generates nothing: `test_controller`. A group
that never forms, tensors that an engine ignores: `test_transaction_faults`, `test_updates`. Circuits, paused and silent
engines behind the real router: `test_router`. An engine that comes back again and again: `test_router`,
`test_pause_window`. Ports: `test_ports`. Swallowed and lost answers: `tests/rollout/test_engine_client`. Orphans:
`tests/host`. All of it on real engines: `tests/system`.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest
import torch

from asyncrl.config import Config
from asyncrl.errors import TrainerError
from asyncrl.inference.sglang.engine_api import EngineApi
from asyncrl.rollout.requests.generate_client import GenerateClient as RolloutClient
from asyncrl.rollout.requests.generate_client import RequestOptions
from asyncrl.rollout.requests.retry import RetryPolicy
from asyncrl.rollout.requests.wire import Generation, SamplingParams
from asyncrl.weights.transports.process_group import TransferGroup
from tests.inference.conftest import StartFleet, eventually, in_the_middle
from tests.inference.engines.test_recovery import publish, serves
from tests.inference.transaction_rig import Rig, holds, rig, tensors_of
from tests.scripted import Latency, ScriptedEngine, instead

pytestmark = pytest.mark.anyio

TOKENS = 60
SAMPLING = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, ignore_eos=True)


async def publish_under_load(rig: Rig, version: str, requests: int) -> list[Generation]:
    """Publishes in the middle of `requests` generations; returns them all."""
    generations: list[Generation] = []
    options = RequestOptions(
        vocab_size=1 << 20,
        timeout_s=10.0,
        retry=RetryPolicy(retries=0, patience_s=1.0, first_delay_s=0.1),
    )
    client = RolloutClient(rig.fleet.controller.router_url, options)

    async def one(number: int) -> None:
        generations.append(await client.generate(f"{number:08d}.000", msgspec.Raw(b"[1,2]"), SAMPLING))

    async with (
        client,
        anyio.create_task_group() as task_group,
        in_the_middle(rig.fleet.engines, lambda: requests) as stand,
    ):
        for number in range(requests):
            task_group.start_soon(one, number)
        await stand()
        await rig.publish(version)
    return generations


async def test_more_requests_than_slots_survive_an_update_that_flushes_the_cache(start_fleet: StartFleet) -> None:
    async with rig(start_fleet, latency=Latency(token_s=0.004), slots=4) as r:
        await r.publish("0.0")
        generations = await publish_under_load(r, "0.1", requests=24)
        assert [len(g.output_ids) for g in generations] == [TOKENS] * 24
        spans = [tuple(span.version for span in g.versions) for g in generations]
        assert ("0.0", "0.1") in spans, "none was in the middle"
        assert set(spans) <= {("0.0",), ("0.0", "0.1"), ("0.1",)}
        assert all(update["flush_cache"] for engine in r.fleet.engines for update in engine.updates[-1:])


async def test_weights_never_change_under_a_running_request(start_fleet: StartFleet) -> None:
    seen: list[tuple[str, bool, int]] = []

    def look(engine: ScriptedEngine, endpoint: str) -> Callable[[], Awaitable[None]]:
        async def record() -> None:
            seen.append((endpoint, engine.paused, engine.generation.running))

        return record

    async with rig(start_fleet, latency=Latency(token_s=0.004)) as r:
        await r.publish("0.0")
        for engine in r.fleet.engines:
            for endpoint in ("begin_weight_update", "update_weights_from_distributed", "end_weight_update"):
                engine.script(instead(endpoint, look(engine, endpoint), times=None))
        await publish_under_load(r, "0.1", requests=8)
    assert {endpoint for endpoint, _, _ in seen} >= {"begin_weight_update", "update_weights_from_distributed"}
    assert all(paused and running == 0 for _, paused, running in seen)


async def test_a_prompt_is_not_answered_from_the_cache_of_old_weights(start_fleet: StartFleet) -> None:
    prompt = list(range(50))

    async with rig(start_fleet, engines=1) as r:
        await r.publish("0.0")
        engine = r.fleet.engines[0]

        async def ask() -> tuple[int, list[float]]:
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 8, "temperature": 0.0}}
            meta = (await engine.generation.generate(body, lambda: False))["meta_info"]
            return meta["cached_tokens"], [logprob for logprob, _, _ in meta["output_token_logprobs"]]

        first, again = await ask(), await ask()
        assert (first[0], again[0]) == (0, 49)
        assert first[1] == again[1]
        await r.publish("0.1")
        cached, logprobs = await ask()
        assert cached == 0
        assert logprobs != first[1]
        other = ScriptedEngine(tensors_of("0.1"))  # one that never held anything else
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 8, "temperature": 0.0}}
        fresh = await other.generation.generate(body, lambda: False)
        assert logprobs == [logprob for logprob, _, _ in fresh["meta_info"]["output_token_logprobs"]]


def hold_garbage(engine: ScriptedEngine) -> None:
    """From the end of its next update on."""

    async def flip_a_bit() -> None:
        engine.weights.load([("layer.1", torch.zeros(16, 16))])

    engine.script(instead("end_weight_update", flip_a_bit))


async def test_an_engine_that_says_yes_and_holds_garbage_never_serves(start_fleet: StartFleet) -> None:
    async with rig(start_fleet, engines=3) as r:
        hold_garbage(r.fleet.engines[1])
        await r.publish("0.0")
        assert r.complaints() == []
        assert r.serves(0, "0.0") and r.serves(2, "0.0")
        assert not r.fleet.engines[1].alive


async def test_of_two_engines_of_which_one_holds_garbage_both_are_given_the_weights_again(
    start_fleet: StartFleet,
) -> None:
    async with rig(start_fleet, restarts=1) as r:
        hold_garbage(r.fleet.engines[1])
        report = await r.publish("0.0")
        assert r.complaints() == [] and r.serves(0, "0.0") and r.serves(1, "0.0")
        assert report.engines and [engine.lives for engine in r.fleet.engines] == [1, 1]


async def test_after_a_trainer_that_left_in_mid_transfer_no_engine_is_routed_until_it_holds_a_version(
    start_fleet: StartFleet,
) -> None:
    async with rig(start_fleet) as r:
        await r.publish("0.0")

        def leave(number: int) -> None:
            if number == 5:
                raise TrainerError("trainer rank 0: killed")

        r.source.before_tensor = leave
        with pytest.raises(TrainerError):
            await r.publish("0.1")
        assert r.fleet.router.workers == []
        assert not any(holds(engine, tensors_of("0.0")) for engine in r.fleet.engines), "nothing was transferred"
        r.source.before_tensor = None
        await r.publish("0.2")
        assert r.serves(0, "0.2") and r.serves(1, "0.2")


async def test_a_recovered_engine_answers_first_with_the_published_weights(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    """It loads the base weights when it starts again, as what looks like a version of its own."""
    async with rig(start_fleet, restarts=3, copies=tmp_path / "copies") as r:
        await r.publish("0.0")
        await r.publish("0.1")
        victim = r.fleet.engines[1]
        for life in (2, 3):
            victim.kill()
            await eventually(lambda life=life: victim.lives == life and r.serves(1, "0.1"))
            assert r.complaints() == []
            assert victim.calls[::-1].index("update_weights_from_disk") < victim.calls[::-1].index("generate")
            async with EngineApi.open("engine-1", victim.url) as client:
                answer = await client.generate([1])
            assert answer.meta_info.weight_version == "0.1"
            assert holds(victim, tensors_of("0.1"))
        await r.publish("0.2")
        assert r.serves(0, "0.2") and r.serves(1, "0.2")


async def ask_at_once(router_url: str, requests: int, *, retries: int) -> list[Generation]:
    """As many requests as are wanted, all at once; raises where one has no answer in the end."""
    generations: list[Generation] = []
    policy = RetryPolicy(retries=retries, patience_s=10.0, first_delay_s=0.1)
    client = RolloutClient(router_url, RequestOptions(vocab_size=1 << 20, timeout_s=10.0, retry=policy))

    async def one(number: int) -> None:
        generations.append(await client.generate(f"{number:08d}.000", msgspec.Raw(b"[1,2]"), SAMPLING))

    async with client, anyio.create_task_group() as task_group:
        for number in range(requests):
            task_group.start_soon(one, number)
    return generations


async def test_a_hundred_requests_right_after_the_first_publication_need_no_second_try(start_fleet: StartFleet) -> None:
    async with start_fleet(2) as fleet:
        await publish(fleet, "0.0", None)
        answers = await ask_at_once(fleet.controller.router_url, 100, retries=0)
        assert [len(answer.output_ids) for answer in answers] == [TOKENS] * 100


@pytest.mark.parametrize("how_long", ["shorter than a conviction", "for good"])
async def test_traffic_returns_by_itself_after_all_engines_stood_still(
    start_fleet: StartFleet, tmp_path: Path, how_long: str
) -> None:
    health = {"interval_s": 0.1, "timeout_s": 0.3 if how_long == "for good" else 5.0, "failures": 2}
    async with start_fleet(2, restarts=3, health=health) as fleet:
        await publish(fleet, "0.0", tmp_path)
        for engine in fleet.engines:
            engine.suspend()
        if how_long == "for good":
            await eventually(lambda: [engine.lives for engine in fleet.engines] == [2, 2])
            lives = [2, 2]
        else:
            await anyio.sleep(0.25)
            for engine in fleet.engines:
                engine.go_on()
            lives = [1, 1]
        answers = await ask_at_once(fleet.controller.router_url, 16, retries=5)
        assert [len(answer.output_ids) for answer in answers] == [TOKENS] * 16
        assert {span.version for answer in answers for span in answer.versions} == {"0.0"}
        await eventually(lambda: serves(fleet, 0, "0.0") and serves(fleet, 1, "0.0"))
        assert [engine.lives for engine in fleet.engines] == lives
    assert fleet.failures == []


async def test_every_server_is_bound_to_the_address_under_which_it_is_told(start_fleet: StartFleet) -> None:
    """There is one setting for both, an address and no name, since all servers of a job stay on loopback."""
    async with start_fleet(1, run={"host": "127.0.0.2"}) as fleet:
        await publish(fleet, "0.0", None)
        for spec in fleet.host.specs.values():
            bound = [spec.argv[i + 1] for i, flag in enumerate(spec.argv) if flag in ("--host", "--prometheus-host")]
            assert set(bound) == {"127.0.0.2"}
        view = fleet.controller.fleet()
        told = [view.router_url, *view.metrics_urls.values(), *(status.endpoint.url for status in view.engines)]
        assert all(url.startswith("http://127.0.0.2:") for url in told)
        assert serves(fleet, 0, "0.0")
        assert len(await ask_at_once(view.router_url, 1, retries=0)) == 1


def test_the_address_of_a_job_is_never_a_name() -> None:
    assert Config.model_validate({"run": {"host": "localhost"}}).run.host == "127.0.0.1"


async def test_the_wire_of_the_weights_is_bound_to_that_address_too() -> None:
    group = TransferGroup("gloo", "wire", 2, "127.0.0.2", timeout_s=1.0)
    try:
        with socket.create_connection(("127.0.0.2", group.port), timeout=1.0):
            pass
        own = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert [address.ip for address in own if address.port == group.port] == ["127.0.0.2"]
    finally:
        group.drop()
