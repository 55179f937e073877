"""Weight publication into the real engine, by every transport, and what interrupts it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import pytest
import torch
from safetensors.torch import load_file

from asyncrl.data.fleet import EngineState, read_stamp
from asyncrl.inference.sglang.engine_api import EngineApi
from asyncrl.weights.publication import PublicationReport
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.transfer import Transport
from asyncrl.weights.transports.broadcast import BroadcastTransport
from asyncrl.weights.transports.disk import DiskTransport
from asyncrl.weights.transports.process_group import PROOF, TransferGroup, broadcast, form_all
from asyncrl.weights.transports.tensor import TensorTransport
from tests.system.conftest import RealFleet
from tests.weights.fakes import ThreadSource

pytestmark = [pytest.mark.anyio, pytest.mark.system, pytest.mark.timeout(450)]

PROMPT = [7 + (5 * i) % 50 for i in range(40)]
TOKENS = 24
SMALL_BUCKET = 32 * 1024
"""Bytes; cuts the tiny model into several buckets."""


@pytest.fixture
async def second(serving_fleet: RealFleet) -> AsyncIterator[ThreadSource]:
    """A trainer that holds the second model, beside a fleet that serves the first."""
    source = ThreadSource(load_file(serving_fleet.models[1] / "model.safetensors"))
    yield source
    source.close()


def make_transport(kind: str, directory: Path) -> Transport:
    if kind == "broadcast":
        return BroadcastTransport(EngineApi.open, backend="gloo", bucket_bytes=SMALL_BUCKET, timeout_s=10.0)
    if kind == "tensor":
        return TensorTransport(EngineApi.open, bucket_bytes=SMALL_BUCKET, timeout_s=10.0)
    return DiskTransport(EngineApi.open, directory=directory, bucket_bytes=SMALL_BUCKET, timeout_s=10.0)


async def publish_to(fleet: RealFleet, source: ThreadSource, transport: Transport, version: str) -> PublicationReport:
    return await Publisher(fleet.controller, source, transport, events=fleet.events).publish(version)


async def generate(fleet: RealFleet, tokens: int = TOKENS) -> dict[str, Any]:
    url = fleet.controller.fleet().engines[0].endpoint.url
    parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/generate", json={"input_ids": PROMPT, "sampling_params": parameters}) as response,
    ):
        answer: dict[str, Any] = await response.json()
        return answer


async def greedy_of_transformers(model: Path) -> list[int]:
    def run() -> list[int]:
        import torch
        from transformers import AutoModelForCausalLM

        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        ids = torch.tensor([PROMPT])
        for _ in range(TOKENS):
            with torch.no_grad():
                ids = torch.cat([ids, policy(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        answer: list[int] = ids[0, len(PROMPT) :].tolist()
        return answer

    return await anyio.to_thread.run_sync(run)


@pytest.mark.parametrize("kind", ["broadcast", "tensor", "disk"])
async def test_the_engine_answers_as_transformers_does_with_the_published_weights(
    kind: str, serving_fleet: RealFleet, second: ThreadSource, tmp_path: Path
) -> None:
    transport = make_transport(kind, tmp_path / "weights")
    before = await generate(serving_fleet)
    assert (await generate(serving_fleet))["meta_info"]["cached_tokens"] > 0, "the prefix is cached"
    version = serving_fleet.next_version()
    report = await publish_to(serving_fleet, second, transport, version)
    after = await generate(serving_fleet)
    await transport.aclose()

    assert after["meta_info"]["cached_tokens"] == 0, "nothing of the old weights is reused"
    assert after["output_ids"] == await greedy_of_transformers(serving_fleet.models[1])
    assert after["output_ids"] != before["output_ids"]
    assert read_stamp(after["meta_info"]["weight_version"]) == (version, "engine-0")
    assert version == serving_fleet.controller.fleet().published_version
    assert report.bytes == sum(t.nbytes for t in second.tensors.values())
    assert (report.attempts, dict(report.failed)) == (1, {})
    assert 0 < report.transfer_s <= report.pause_s <= report.seconds


async def test_a_running_generation_goes_on_under_the_new_version_and_shows_no_torn_span(
    serving_fleet: RealFleet, second: ThreadSource
) -> None:
    transport = make_transport("broadcast", Path())
    old, new = serving_fleet.controller.fleet().published_version, serving_fleet.next_version()
    answers: list[dict[str, Any]] = []
    sampling = anyio.Event()

    async def long_generation() -> None:
        answers.append(await generate(serving_fleet, 300))

    async def until_it_runs() -> None:
        url = serving_fleet.controller.fleet().engines[0].endpoint.url
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{url}/v1/loads") as response:
                    if b'"num_running_reqs":1' in (await response.read()).replace(b" ", b""):
                        sampling.set()
                        return

    async with anyio.create_task_group() as task_group:
        task_group.start_soon(long_generation)
        task_group.start_soon(until_it_runs)
        with anyio.fail_after(10.0):
            await sampling.wait()
        await publish_to(serving_fleet, second, transport, new)
    await transport.aclose()

    spans = [(read_stamp(s["version"])[0], s["start"], s["end"]) for s in answers[0]["meta_info"]["weight_versions"]]
    assert [version for version, _, _ in spans] == [old, new]
    assert spans[0][1] == 0 and spans[0][2] == spans[1][1] and spans[1][2] == 300


@pytest.mark.parametrize("how", ["cancelled", "trainer fails"])
async def test_a_transfer_that_stops_halfway_frees_the_engine_for_the_next_one(
    how: str, serving_fleet: RealFleet, second: ThreadSource
) -> None:
    transport = make_transport("broadcast", Path())
    scope = anyio.CancelScope()
    loop = asyncio.get_running_loop()

    def interrupt(number: int) -> None:
        if number == len(second.tensors) // 2:
            if how == "trainer fails":
                raise RuntimeError("the trainer fell over")
            loop.call_soon_threadsafe(scope.cancel)

    second.before_tensor = interrupt
    with anyio.fail_after(20.0):
        if how == "cancelled":
            with scope:
                await publish_to(serving_fleet, second, transport, serving_fleet.next_version())
        else:
            with pytest.raises(RuntimeError, match="fell over"):
                await publish_to(serving_fleet, second, transport, serving_fleet.next_version())
    status = serving_fleet.controller.fleet().engines[0]
    if how == "trainer fails" or scope.cancelled_caught:
        assert status.state is EngineState.PENDING_WEIGHTS and status.version is None, "torn weights serve nobody"

    second.before_tensor = None
    await publish_to(serving_fleet, second, transport, serving_fleet.next_version())
    await transport.aclose()
    answer = await generate(serving_fleet)
    assert answer["output_ids"] == await greedy_of_transformers(serving_fleet.models[1])
    assert serving_fleet.controller.fleet().engines[0].state is EngineState.SERVING


async def test_what_proves_a_transfer_group_changes_no_weight(serving_fleet: RealFleet) -> None:
    """Over NCCL each group is proved by one element under a name that no model has."""
    controller = serving_fleet.controller
    lease = await controller.begin_weight_update(serving_fleet.next_version())
    engine = lease.engines[0]
    group = TransferGroup("gloo", "proof", 2, "127.0.0.1", timeout_s=30.0)

    def send() -> None:
        form_all([group], 30.0)
        broadcast({engine.engine_id: group}, [torch.zeros(PROOF.shape)])

    async with EngineApi.open(engine.engine_id, engine.url) as client, anyio.create_task_group() as tasks:
        before = await client.check_weights("checksum")
        tasks.start_soon(anyio.to_thread.run_sync, send)
        await client.init_weights_group(
            master_address="127.0.0.1",
            master_port=group.port,
            rank_offset=1,
            world_size=2,
            group_name="proof",
            backend="gloo",
            timeout_s=60.0,
        )
        await client.update_from_distributed(
            [PROOF], group_name="proof", flattened=False, flush_cache=False, timeout_s=60.0
        )
        assert await client.check_weights("checksum") == before and group.failure is None
        group.drop()
        await client.destroy_weights_group("proof")
    await controller.abort_weight_update(lease.lease_id, {}, untouched=True)
