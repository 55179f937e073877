"""Engines are taken out of service and put into it while the job runs."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import anyio
import pytest

from asyncrl.config import Config
from asyncrl.config.layout import Gpu
from asyncrl.config.machine import Machine
from asyncrl.config.placement.rules import place_another, plan_layout
from asyncrl.data.fleet import read_stamp
from asyncrl.errors import EngineError
from tests.inference.conftest import Fleet, StartFleet, cpu_layout, eventually
from tests.inference.engines.test_recovery import FAST, publish, serves
from tests.scripted import Latency, ScriptedEngine, freeze, hang

pytestmark = pytest.mark.anyio

SLOW = Latency(token_s=0.01)
ENDLESS = 100_000
"""Tokens: more than any test waits for."""


def slow(fleet: Fleet) -> None:
    for engine in fleet.engines:
        engine.latency = SLOW


@asynccontextmanager
async def request_on(engine: ScriptedEngine, tokens: int) -> AsyncIterator[list[dict[str, object]]]:
    """A generation that runs in `engine`; the list holds its answer once it is there (None of it when it broke)."""
    answers: list[dict[str, object]] = []

    async def ask() -> None:
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
        try:
            async with aiohttp.ClientSession() as session, session.post(engine.url + "/generate", json=body) as reply:
                answers.append(await reply.json())
        except aiohttp.ClientError as error:
            answers.append({"broken": str(error)})

    async with anyio.create_task_group() as task_group:
        task_group.start_soon(ask)
        await eventually(lambda: engine.generation.running > 0)
        yield answers


async def test_a_stopped_engine_finishes_its_requests_and_is_neither_failed_nor_started_again(
    start_fleet: StartFleet,
) -> None:
    async with start_fleet(2, restarts=3, prepare=slow) as fleet:
        await publish(fleet, "0.0", None)
        async with request_on(fleet.engines[0], ENDLESS) as answers, anyio.create_task_group() as task_group:
            task_group.start_soon(fleet.controller.stop_cell, "engine-0")
            await eventually(lambda: fleet.states() == ["draining", "serving"])
            await eventually(lambda: fleet.router.workers == [fleet.engines[1].url])
            await eventually(lambda: fleet.engines[0].calls.count("flush_cache") > 1)  # it was found busy
            assert answers == []
            fleet.engines[0].generation.finish()
        assert answers[0]["meta_info"]["finish_reason"]["type"] == "length"  # type: ignore[index]
        assert fleet.states() == ["stopped", "serving"]
        assert not fleet.engines[0].alive
        assert fleet.engines[0].lives == 1
        assert fleet.controller.statistics().restarts == 0
        assert not {"engine_exited", "process_restarting", "process_given_up"} & set(fleet.kinds())
        stopped = next(event for event in fleet.events.recent if event["kind"] == "engine_stopped")
        assert stopped["engine"] == "engine-0" and stopped["drained"] is True
        await fleet.controller.recover_updatable_engines()  # waits for nobody who was stopped
    assert fleet.failures == []


async def test_a_publication_passes_a_draining_engine_by_and_its_requests_keep_their_version(
    start_fleet: StartFleet,
) -> None:
    async with start_fleet(2, prepare=slow) as fleet:
        await publish(fleet, "0.0", None)
        async with request_on(fleet.engines[0], ENDLESS) as answers, anyio.create_task_group() as task_group:
            task_group.start_soon(fleet.controller.stop_cell, "engine-0")
            await eventually(lambda: fleet.states()[0] == "draining")
            lease = await fleet.controller.begin_weight_update("0.1")
            assert [engine.engine_id for engine in lease.engines] == ["engine-1"]
            await fleet.controller.abort_weight_update(lease.lease_id, {}, untouched=True)
            await publish(fleet, "0.1", None)
            assert answers == []
            assert not fleet.engines[0].paused
            assert fleet.router.workers == [fleet.engines[1].url]
            fleet.engines[0].generation.finish()
        assert {read_stamp(run["version"])[0] for run in answers[0]["meta_info"]["weight_versions"]} == {"0.0"}  # type: ignore[index]
        assert serves(fleet, 1, "0.1")


async def test_draining_takes_no_longer_than_it_may(start_fleet: StartFleet) -> None:
    async with start_fleet(2, prepare=slow, engine={"drain_timeout_s": 0.3}) as fleet:
        await publish(fleet, "0.0", None)
        async with request_on(fleet.engines[0], ENDLESS) as answers:
            with anyio.fail_after(10):
                await fleet.controller.stop_cell("engine-0")
        assert "broken" in answers[0]
        stopped = next(event for event in fleet.events.recent if event["kind"] == "engine_stopped")
        assert stopped["drained"] is False


@pytest.mark.parametrize("way", ["dies", "hangs"])
async def test_a_draining_engine_that_dies_or_hangs_is_stopped_at_that_moment_and_not_started_again(
    start_fleet: StartFleet, way: str
) -> None:
    async with start_fleet(2, restarts=3, prepare=slow, **FAST) as fleet:
        await publish(fleet, "0.0", None)
        async with request_on(fleet.engines[0], ENDLESS), anyio.create_task_group() as task_group:
            task_group.start_soon(fleet.controller.stop_cell, "engine-0")
            await eventually(lambda: fleet.states()[0] == "draining")
            if way == "dies":
                await fleet.host.signal("engine-0", signal.SIGKILL)
            else:
                fleet.engines[0].script(freeze("health_generate"))
            await eventually(lambda: fleet.states()[0] == "stopped")
        assert fleet.engines[0].lives == 1
        assert fleet.controller.statistics().restarts == 0
    assert fleet.failures == []


async def test_a_stop_that_is_cancelled_while_the_engine_drains_ends_it_all_the_same(start_fleet: StartFleet) -> None:
    async with start_fleet(2, prepare=slow) as fleet:
        await publish(fleet, "0.0", None)
        async with request_on(fleet.engines[0], ENDLESS):
            async with anyio.create_task_group() as task_group:
                task_group.start_soon(fleet.controller.stop_cell, "engine-0")
                await eventually(lambda: fleet.states()[0] == "draining")
                task_group.cancel_scope.cancel()
            assert fleet.states() == ["stopped", "serving"]
            assert not fleet.engines[0].alive


async def test_the_last_engine_that_serves_is_stopped_only_by_force(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with start_fleet(2, restarts=1) as fleet:
        await publish(fleet, "0.0", tmp_path)
        await fleet.controller.stop_cell("engine-1")
        with pytest.raises(EngineError, match="engine-0 was not stopped: it is the last engine that serves"):
            await fleet.controller.stop_cell("engine-0")
        assert serves(fleet, 0, "0.0")
        await fleet.controller.stop_cell("engine-0", force=True)
        for asked in (fleet.controller.prepare_rollout(1), fleet.controller.begin_weight_update("0.1")):
            with (
                anyio.fail_after(10),
                pytest.raises(EngineError, match=r"no engine runs for .*start one with start_cell"),
            ):
                await asked
        await fleet.controller.start_cell("engine-0")
        await fleet.controller.prepare_rollout(1)
        assert serves(fleet, 0, "0.0")
    assert fleet.failures == []


async def test_two_engines_that_are_stopped_at_once_leave_one_that_serves(start_fleet: StartFleet) -> None:
    async with start_fleet(2) as fleet:
        await publish(fleet, "0.0", None)
        refused: list[str] = []

        async def stop(engine_id: str) -> None:
            try:
                await fleet.controller.stop_cell(engine_id)
            except EngineError as error:
                refused.append(str(error))

        async with anyio.create_task_group() as task_group:
            task_group.start_soon(stop, "engine-0")
            task_group.start_soon(stop, "engine-1")
        assert len(refused) == 1
        assert sorted(fleet.states()) == ["serving", "stopped"]


async def test_an_engine_that_takes_weights_is_stopped_after_it_has_them(start_fleet: StartFleet) -> None:
    async with start_fleet(2) as fleet:
        await publish(fleet, "0.0", None)
        lease = await fleet.controller.begin_weight_update("0.1")
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(fleet.controller.stop_cell, "engine-0")
            await anyio.wait_all_tasks_blocked()
            assert fleet.states() == ["updating", "updating"]
            await fleet.controller.abort_weight_update(lease.lease_id, {}, untouched=True)
        assert fleet.states() == ["stopped", "serving"]
        assert fleet.router.workers == [fleet.engines[1].url]


async def test_a_stopped_engine_that_is_started_again_catches_up_as_a_new_generation(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(2, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        await fleet.controller.stop_cell("engine-0")
        await fleet.controller.stop_cell("engine-0")  # nothing to do
        await publish(fleet, "0.1", tmp_path)
        with pytest.raises(EngineError, match="engine-1 cannot be started: it is serving"):
            await fleet.controller.start_cell("engine-1")
        await fleet.controller.start_cell("engine-0")
        await fleet.controller.recover_updatable_engines()
        assert serves(fleet, 0, "0.1") and serves(fleet, 1, "0.1")
        assert fleet.controller.fleet().engines[0].endpoint.generation == 1
        await fleet.host.kill("engine-0")  # it is kept running as before
        await eventually(lambda: fleet.engines[0].lives == 3 and serves(fleet, 0, "0.1"))
    assert fleet.failures == []


async def test_a_new_engine_joins_with_the_published_weights(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with start_fleet(1, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        with pytest.raises(EngineError, match="there are engine-0, and engine-1 is next"):
            await fleet.controller.start_cell("engine-7")
        added = ScriptedEngine()
        fleet.engines.append(added)
        fleet.host.servers["engine-1"] = added
        await fleet.controller.start_cell("engine-1")
        await fleet.controller.recover_updatable_engines()
        assert serves(fleet, 1, "0.0")
        assert added.weights.digest == fleet.engines[0].weights.digest
        await fleet.controller.stop_cell("engine-0")
        await publish(fleet, "0.1", tmp_path)
        assert serves(fleet, 1, "0.1")
    assert fleet.failures == []


async def test_a_new_engine_that_cannot_start_is_given_up_and_the_others_go_on(start_fleet: StartFleet) -> None:
    async with start_fleet(1, restarts=3) as fleet:
        await publish(fleet, "0.0", None)
        broken = ScriptedEngine()
        broken.exit_code = 1
        fleet.host.servers["engine-1"] = broken
        await fleet.controller.start_cell("engine-1")
        await eventually(lambda: fleet.states() == ["serving", "dead"])
        await fleet.controller.recover_updatable_engines()
        broken.exit_code = None
        fleet.engines.append(broken)
        await fleet.controller.start_cell("engine-1")  # given up is not for ever
        await eventually(lambda: fleet.states() == ["serving", "pending_weights"])
    assert fleet.failures == []


async def test_an_engine_that_is_stopped_before_its_process_is_there_leaves_none(start_fleet: StartFleet) -> None:
    async with start_fleet(1) as fleet:
        await publish(fleet, "0.0", None)
        added = ScriptedEngine()
        fleet.host.servers["engine-1"] = added
        await fleet.controller.start_cell("engine-1")
        await fleet.controller.stop_cell("engine-1")
        await anyio.wait_all_tasks_blocked()
        assert not added.alive
        assert fleet.states() == ["serving", "stopped"]


async def test_an_engine_that_leaves_while_the_router_takes_it_in_is_unknown_in_the_end(
    start_fleet: StartFleet,
) -> None:
    async with start_fleet(2) as fleet:
        await fleet.controller.wait_ready()
        fleet.router.faults.add(hang("add_worker", seconds=0.3, times=2))
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(publish, fleet, "0.0", None)
            await eventually(lambda: fleet.states() == ["serving", "serving"])
            fleet.engines[0].script(hang("flush_cache", seconds=0.5))  # it lives on while the router takes it in
            with anyio.fail_after(10):
                await fleet.controller.stop_cell("engine-0")
        assert fleet.router.faults.happened
        await eventually(lambda: fleet.router.workers == [fleet.engines[1].url])
        assert fleet.states() == ["stopped", "serving"]


def test_on_gpus_a_new_engine_takes_those_that_nobody_uses() -> None:
    config = Config.model_validate({"engine": {"num_engines": 1}})
    machine = Machine(gpus=("GPU-a", "GPU-b", "GPU-c"))
    layout = plan_layout(config, machine)
    placement = place_another(config, layout, "engine-1", {Gpu(0, 1)})
    assert (placement.gpus, placement.visible_devices, placement.transport) == ((2,), "GPU-c", "broadcast")
    with pytest.raises(EngineError, match=r"engine-2 needs 1 GPU of its own: no GPU is left"):
        place_another(config, layout, "engine-2", {Gpu(0, 1), Gpu(0, 2)})


def test_no_engine_is_added_beside_those_that_share_the_trainers_gpus() -> None:
    config = Config.model_validate({"engine": {"num_engines": 1, "colocate": True}})
    layout = plan_layout(config, Machine(gpus=("0", "1")))
    with pytest.raises(EngineError, match="the others share GPUs with the trainer"):
        place_another(config, layout, "engine-1", {Gpu(0, 0)})


async def test_an_engine_that_shares_the_trainers_gpus_stays(start_fleet: StartFleet) -> None:
    layout = cpu_layout(2)
    shared = tuple(replace(placement, trainer_ranks=(0,)) for placement in layout.engines)
    async with start_fleet(2, layout=replace(layout, engines=shared)) as fleet:
        await publish(fleet, "0.0", None)
        with pytest.raises(EngineError, match="engine-0 shares its GPUs with the trainer"):
            await fleet.controller.stop_cell("engine-0")
        assert serves(fleet, 0, "0.0")
