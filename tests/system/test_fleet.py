"""The controller over the real engine and router."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path

import aiohttp
import anyio
import psutil
import pytest

from asyncrl.config.machine import Machine
from asyncrl.config.placement.rules import plan_layout
from asyncrl.data.fleet import EngineState, read_stamp
from asyncrl.errors import EngineError, WeightUpdateError
from asyncrl.host import EngineHost
from asyncrl.inference.controller import InferenceController
from asyncrl.inference.routing.router_client import RouterClient
from asyncrl.inference.sglang.engine_api import EngineApi, EngineRequestError
from asyncrl.observability.events import EventLog
from asyncrl.weights.buckets import TensorSpec
from tests.system.conftest import RealFleet, fleet_config

pytestmark = [pytest.mark.anyio, pytest.mark.system, pytest.mark.timeout(450)]

PROMPT = [10, 20, 30, 40]


def engine_client(fleet: RealFleet):
    endpoint = fleet.controller.fleet().engines[0].endpoint
    return EngineApi.open(endpoint.engine_id, endpoint.url)


async def generate_through_router(fleet: RealFleet, session: aiohttp.ClientSession, tokens: int) -> dict:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
    }
    async with session.post(fleet.controller.router_url + "/generate", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def until_running(fleet: RealFleet, session: aiohttp.ClientSession) -> None:
    """Returns once the engine generates; it tells that every few steps of decoding."""
    url = fleet.controller.fleet().engines[0].endpoint.url
    with anyio.fail_after(30):
        while True:
            async with session.get(f"{url}/v1/loads") as response:
                if any(load["num_running_reqs"] for load in (await response.json())["loads"]):
                    return
            await anyio.sleep(0.01)


async def test_an_engine_is_ready_by_itself_and_unknown_to_the_router_until_weights_are_published(
    fleet: RealFleet,
) -> None:
    # First in this module, so that it sees the fleet before any publication when the module runs alone.
    async with engine_client(fleet) as client:
        assert len((await client.generate(PROMPT, max_new_tokens=4)).output_ids) == 4
    if fleet.publications == 0:
        assert fleet.controller.fleet().engines[0].state is EngineState.PENDING_WEIGHTS
        with pytest.raises(EngineError, match="no engine can serve rollout 0"):
            await fleet.controller.prepare_rollout(0)


async def test_a_hundred_requests_right_after_the_first_publication_get_a_hundred_answers(
    fleet: RealFleet,
) -> None:
    version = await fleet.publish_from_disk(fleet.models[0])
    await fleet.controller.prepare_rollout(0)
    answers: list[dict] = []
    async with aiohttp.ClientSession() as session, anyio.create_task_group() as task_group:

        async def one() -> None:
            answers.append(await generate_through_router(fleet, session, 2))

        for _ in range(100):
            task_group.start_soon(one)
    assert len(answers) == 100
    assert {read_stamp(answer["meta_info"]["weight_version"]) for answer in answers} == {(version, "engine-0")}
    assert fleet.controller.fleet().published_version == version


async def test_published_weights_answer_and_the_prefix_cache_of_the_old_ones_does_not(
    serving_fleet: RealFleet,
) -> None:
    prompt = list(range(5, 60))
    async with engine_client(serving_fleet) as client:
        first = await client.generate(prompt, max_new_tokens=16)
        await serving_fleet.publish_from_disk(serving_fleet.models[1])
        second = await client.generate(prompt, max_new_tokens=16)
        await serving_fleet.publish_from_disk(serving_fleet.models[0])
        again = await client.generate(prompt, max_new_tokens=16)
    assert first.output_ids != second.output_ids
    assert again.output_ids == first.output_ids


async def test_running_requests_keep_their_tokens_over_an_update_and_no_span_is_torn(
    serving_fleet: RealFleet,
) -> None:
    before = serving_fleet.controller.fleet().published_version
    answers: list[dict] = []
    async with aiohttp.ClientSession() as session, anyio.create_task_group() as task_group:

        async def one() -> None:
            answers.append(await generate_through_router(serving_fleet, session, 400))

        for _ in range(4):
            task_group.start_soon(one)
        await until_running(serving_fleet, session)
        after = await serving_fleet.publish_from_disk(serving_fleet.models[1])
        task_group.start_soon(one)
    versions = [[read_stamp(run["version"])[0] for run in a["meta_info"]["weight_versions"]] for a in answers]
    assert all(len(a["output_ids"]) == 400 for a in answers)
    assert [before, after] in versions
    assert not [v for spans in versions for v in spans if v.startswith("torn")]


async def test_an_aborted_update_leaves_the_engine_unpaused_and_out_of_the_router(serving_fleet: RealFleet) -> None:
    controller = serving_fleet.controller
    await serving_fleet.publish_from_disk(serving_fleet.models[0], keep_copy=False)
    async with aiohttp.ClientSession() as session:
        lease = await controller.begin_weight_update("0.999")
        with pytest.raises(WeightUpdateError, match="is open"):
            await controller.begin_weight_update("0.998")
        await controller.abort_weight_update(lease.lease_id, {})
        assert controller.fleet().engines[0].state is EngineState.PENDING_WEIGHTS
        assert await RouterClient(controller.router_url, session).workers() == ()
        async with engine_client(serving_fleet) as client:
            assert (await client.generate(PROMPT, timeout_s=10)).meta_info.weight_version == "torn:0.999"
        version = await serving_fleet.publish_from_disk(serving_fleet.models[0])
        answer = await generate_through_router(serving_fleet, session, 2)
    assert read_stamp(answer["meta_info"]["weight_version"])[0] == version


async def test_an_update_given_up_before_any_tensor_goes_on_with_the_old_version(serving_fleet: RealFleet) -> None:
    controller = serving_fleet.controller
    version = controller.fleet().published_version
    lease = await controller.begin_weight_update("0.999")
    await controller.abort_weight_update(lease.lease_id, {}, untouched=True)
    async with aiohttp.ClientSession() as session:
        answer = await generate_through_router(serving_fleet, session, 2)
    assert read_stamp(answer["meta_info"]["weight_version"])[0] == version


async def test_a_cancelled_begin_leaves_nothing_paused(serving_fleet: RealFleet) -> None:
    for delay_s in (0.0, 0.003, 0.01, 0.03):
        with anyio.move_on_after(delay_s):
            lease = await serving_fleet.controller.begin_weight_update("0.999")
            await serving_fleet.controller.abort_weight_update(lease.lease_id, {}, untouched=True)
        lease_left = serving_fleet.controller.statistics().open_lease
        if lease_left is not None:
            await serving_fleet.controller.abort_weight_update(lease_left, {}, untouched=True)
        async with engine_client(serving_fleet) as client:
            await client.generate(PROMPT, timeout_s=10)


async def test_a_refused_control_call_names_engine_endpoint_and_reason(serving_fleet: RealFleet) -> None:
    async with engine_client(serving_fleet) as client:
        with pytest.raises(EngineRequestError, match=r"engine-0: /update_weights_from_distributed: HTTP 400: .*begin"):
            await client.update_from_distributed(
                [TensorSpec("x", "float32", (1,))], group_name="g", flattened=False, flush_cache=False, timeout_s=10
            )
        with pytest.raises(EngineRequestError) as error:
            await client.update_from_disk("/nowhere")
        assert error.value.status == 400


async def test_a_name_that_the_engine_ignores_is_found_by_the_reset(serving_fleet: RealFleet) -> None:
    """What the controller does on a first publication, on the real checker: all tensors change but those not sent."""
    from asyncrl.inference.updates.verify import unreceived

    await serving_fleet.publish_from_disk(serving_fleet.models[0], keep_copy=False)
    lease = await serving_fleet.controller.begin_weight_update("0.999")
    async with engine_client(serving_fleet) as client:
        await client.check_weights("reset_tensors")
        before = await client.check_weights("checksum")
        assert len(unreceived(before, before)) == len(before[0].checksums)
        await client.update_from_disk(str(serving_fleet.models[0]))
        assert unreceived(before, await client.check_weights("checksum")) == ()
    await serving_fleet.controller.abort_weight_update(lease.lease_id, {})
    await serving_fleet.publish_from_disk(serving_fleet.models[0])


async def test_over_long_prompts_are_their_own_errors_and_open_no_circuit(serving_fleet: RealFleet) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(20):
            body = {"input_ids": [5] * 2000, "sampling_params": {"max_new_tokens": 4}}
            async with session.post(serving_fleet.controller.router_url + "/generate", json=body) as response:
                assert response.status == 400
        await generate_through_router(serving_fleet, session, 2)


@pytest.mark.long
async def test_a_router_whose_only_engine_stood_still_serves_again_by_itself(serving_fleet: RealFleet) -> None:
    """Longer than three health checks: the router counts the engine out, and in again when it moves."""
    controller = serving_fleet.controller
    processes = psutil.Process(serving_fleet.host.pid).children(recursive=True)
    engine = os.getpgid(next(process.pid for process in processes if "sglang.launch_server" in process.cmdline()))
    os.killpg(engine, signal.SIGSTOP)
    async with aiohttp.ClientSession() as session:
        router = RouterClient(controller.router_url, session)
        try:
            with anyio.fail_after(60):
                while any(worker.is_healthy for worker in await router.workers()):  # noqa: ASYNC110
                    await anyio.sleep(0.2)
        finally:
            os.killpg(engine, signal.SIGCONT)
        with anyio.fail_after(20):
            while not all(worker.is_healthy for worker in await router.workers()):  # noqa: ASYNC110
                await anyio.sleep(0.2)
        await generate_through_router(serving_fleet, session, 2)


@pytest.mark.long
async def test_an_engine_on_a_broken_model_is_reported_at_once_and_nothing_stays(
    tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_models[0], broken)
    (broken / "config.json").write_text("{ this is no json")
    config = fleet_config(broken, tmp_path, start_timeout_s=200)
    children_before = {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)}
    with anyio.fail_after(150):
        async with EngineHost.start(tmp_path / "logs") as host:
            controller = InferenceController(
                config,
                hosts={0: host},
                events=EventLog(None),
                layout=plan_layout(config, Machine()),
                model_path=broken,
                run_dir=tmp_path,
            )
            with pytest.raises(BaseExceptionGroup) as raised:
                async with anyio.create_task_group() as task_group:
                    await controller.start(task_group)
                    await controller.wait_ready()
            ports = [int(controller.router_url.rpartition(":")[2])]
            ports += [int(status.endpoint.url.rpartition(":")[2]) for status in controller.fleet().engines]
            await controller.dispose()
    assert raised.group_contains(EngineError, match=r"engine-0 .* exited with code \d+ before its first generation")
    assert raised.group_contains(EngineError, match=r"Last lines of .*engine-0\.log(.|\n)*json")
    for port in ports:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))
            sock.listen()
    left = {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)} - children_before
    assert not left
