"""The controller over scripted engines: starts, deaths, what it tells and what it refuses."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import anyio
import pytest
import torch
from structlog.testing import capture_logs

from asyncrl.config import Config
from asyncrl.errors import ConfigError, EngineError
from asyncrl.inference.controller import InferenceController
from asyncrl.observability.events import EventLog
from tests.inference.conftest import Fleet, StartFleet, cpu_layout, eventually
from tests.inference.updates.test_weight_updates import publish
from tests.scripted import ScriptedHost, ScriptedRouter, hang, refuse

pytestmark = pytest.mark.anyio


async def test_a_started_fleet_waits_for_weights_and_is_unknown_to_the_router(start_fleet: StartFleet) -> None:
    async with start_fleet(2) as fleet:
        await fleet.controller.wait_ready()
        assert fleet.states() == ["pending_weights", "pending_weights"]
        assert fleet.router.workers == []
        assert fleet.controller.statistics().start_s is not None
        assert "fleet_ready" in fleet.kinds()
        with pytest.raises(EngineError, match="rollout 0 before weights were published: engine-0 is pending_weights"):
            await fleet.controller.prepare_rollout(0)


async def test_an_engine_that_dies_at_start_is_reported_with_its_log_tail(start_fleet: StartFleet) -> None:
    def prepare(fleet: Fleet) -> None:
        fleet.engines[1].exit_code = 1
        fleet.engines[1].last_words = "Traceback (most recent call last):\nOSError: broken model"

    async with start_fleet(2, prepare=prepare) as fleet:
        with pytest.raises(
            EngineError, match=r"engine-1 \(pid \d+\) exited with code 1 before its first generation"
        ) as error:
            await fleet.controller.wait_ready()
        assert "OSError: broken model" in str(error.value)
        assert "engine-1.log" in str(error.value)
    assert [str(f) for f in fleet.failures] == [str(error.value)]
    exited = next(event for event in fleet.events.recent if event["kind"] == "engine_exited")
    assert exited["engine"] == "engine-1"


async def test_an_engine_that_answers_pings_but_generates_nothing_is_not_ready(start_fleet: StartFleet) -> None:
    def prepare(fleet: Fleet) -> None:
        fleet.engines[0].script(hang("generate", times=None))

    async with start_fleet(1, prepare=prepare, engine={"start_timeout_s": 0.3}) as fleet:
        with pytest.raises(EngineError, match=r"no first generation from engine-0 after 0\.3 s(.|\n)*last words"):
            await fleet.controller.wait_ready()
        assert fleet.states() == ["quarantined"]


async def test_an_engine_whose_first_generation_fails_says_so_at_once_and_each_reason_once(
    start_fleet: StartFleet,
) -> None:
    def prepare(fleet: Fleet) -> None:
        fleet.engines[0].script(refuse("generate", 503, "still loading", times=2))
        fleet.engines[0].script(refuse("generate", 500, "no kernel for this model", times=3))

    with capture_logs() as logs:
        async with start_fleet(1, prepare=prepare) as fleet:
            await fleet.controller.wait_ready()
    told = [line["event"] for line in logs if "HTTP" in line["event"]]
    assert len(told) == 1 and "HTTP 500" in told[0] and "no kernel for this model" in told[0]
    assert "asked again for up to" in told[0]


async def test_an_engine_that_refuses_to_generate_says_why_when_its_time_is_up(start_fleet: StartFleet) -> None:
    def prepare(fleet: Fleet) -> None:
        fleet.engines[0].script(refuse("generate", 503, "still loading", times=None))

    async with start_fleet(1, prepare=prepare, engine={"start_timeout_s": 0.3}) as fleet:
        with pytest.raises(EngineError, match=r"HTTP 503: .*still loading"):
            await fleet.controller.wait_ready()


async def test_a_dead_engine_leaves_the_router_and_the_others_serve(start_fleet: StartFleet) -> None:
    async with start_fleet(2) as fleet:
        await publish(fleet, "0.0")
        assert len(fleet.router.workers) == 2
        await fleet.host.kill("engine-0")
        await eventually(lambda: len(fleet.router.workers) == 1)
        assert fleet.states() == ["dead", "serving"]
        await fleet.controller.prepare_rollout(1)
        await publish(fleet, "0.1")
    assert fleet.failures == []


async def test_giving_up_the_last_engine_ends_the_job_with_its_log(start_fleet: StartFleet) -> None:
    async with start_fleet(1) as fleet:
        await publish(fleet, "0.0")
        await fleet.host.kill("engine-0")
        await eventually(lambda: bool(fleet.failures))
        with pytest.raises(EngineError, match=r"engine-0 \(pid \d+\) was ended by SIGKILL while serving"):
            await fleet.controller.prepare_rollout(1)
        with pytest.raises(EngineError, match="last words"):
            await fleet.controller.begin_weight_update("0.1")


async def test_giving_up_the_router_ends_the_job(start_fleet: StartFleet) -> None:
    async with start_fleet(1) as fleet:
        await publish(fleet, "0.0")
        await fleet.host.kill("router")
        await eventually(lambda: bool(fleet.failures))
        assert re.match(r"router \(pid \d+\) was ended by SIGKILL while engines need it", str(fleet.failures[0]))


async def test_a_router_that_does_not_answer_is_reported_with_its_log_tail(start_fleet: StartFleet) -> None:
    def prepare(fleet: Fleet) -> None:
        fleet.router.faults.add(refuse("workers", 500, times=None))

    async with start_fleet(1, prepare=prepare, router={"start_timeout_s": 0.3}) as fleet:
        with pytest.raises(EngineError, match=r"no first answer from router after 0\.3 s(.|\n)*last words"):
            await fleet.controller.wait_ready()


async def test_the_death_of_the_host_is_told_to_whoever_waits(start_fleet: StartFleet) -> None:
    def prepare(fleet: Fleet) -> None:
        fleet.engines[0].script(hang("generate", times=None))

    async with start_fleet(1, prepare=prepare) as fleet:
        await eventually(lambda: len(fleet.host.specs) == 2)
        fleet.host.die()
        with pytest.raises(EngineError, match="engine host: it died"):
            await fleet.controller.wait_ready()
        assert all("engine host: it died" in str(failure) for failure in fleet.failures)


async def test_a_fleet_that_is_updating_may_still_be_given_a_rollout(start_fleet: StartFleet) -> None:
    async with start_fleet(1) as fleet:
        await publish(fleet, "0.0")
        lease = await fleet.controller.begin_weight_update("0.1")
        await fleet.controller.prepare_rollout(1)
        await fleet.controller.abort_weight_update(lease.lease_id, {}, untouched=True)


async def test_a_taken_router_port_is_named_with_its_field_and_nothing_is_started(tmp_path: Path) -> None:
    host = ScriptedHost({}, ScriptedRouter())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        controller = InferenceController(
            Config.model_validate({"router": {"port": port}}),
            hosts={0: host},
            events=EventLog(None),
            layout=cpu_layout(1),
            model_path=tmp_path,
            run_dir=tmp_path,
        )
        async with anyio.create_task_group() as task_group:
            with pytest.raises(ConfigError, match=rf"router\.port: port {port} is taken"):
                await controller.start(task_group)
        with pytest.raises(EngineError, match="was not started"):
            controller.fleet()
        await controller.dispose()
    assert host.specs == {}


async def test_disposing_twice_leaves_no_port_and_ends_every_watch(start_fleet: StartFleet) -> None:
    async with start_fleet(2) as fleet:
        await publish(fleet, "0.0")
        urls = [status.endpoint.url for status in fleet.controller.fleet().engines]
        await fleet.controller.dispose()
        await fleet.controller.dispose()
        assert fleet.states() == ["stopped", "stopped"]
        for url in [*urls, fleet.controller.router_url]:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections linger in TIME_WAIT
                sock.bind(("0.0.0.0", int(url.rpartition(":")[2])))
                sock.listen()
    assert fleet.failures == []


async def test_whoever_waits_for_a_disposed_fleet_is_told(start_fleet: StartFleet) -> None:
    def prepare(fleet: Fleet) -> None:
        fleet.engines[0].script(hang("generate", times=None))

    async with start_fleet(1, prepare=prepare) as fleet:
        raised: list[EngineError] = []

        async def wait() -> None:
            try:
                await fleet.controller.wait_ready()
            except EngineError as error:
                raised.append(error)

        async with anyio.create_task_group() as task_group:
            task_group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            await fleet.controller.dispose()
        assert "disposed" in str(raised[0])


async def test_memory_endpoints_are_never_sent_to_a_cpu_engine(start_fleet: StartFleet) -> None:
    async with start_fleet(1) as fleet:
        await publish(fleet, "0.0")
        for call in (fleet.controller.offload, fleet.controller.onload_weights, fleet.controller.offload_kv):
            with pytest.raises(EngineError, match="CPU cannot release memory"):
                await call()
        assert not {"release_memory_occupation", "resume_memory_occupation"} & set(fleet.engines[0].calls)


async def test_weights_compare_with_their_snapshot_by_checksum(start_fleet: StartFleet) -> None:
    async with start_fleet(2) as fleet:
        await publish(fleet, "0.0")
        with pytest.raises(EngineError, match="no snapshot"):
            await fleet.controller.check_weights("compare")
        await fleet.controller.check_weights("snapshot")
        await fleet.controller.check_weights("compare")
        fleet.engines[1].weights.load([("layer", torch.zeros(4, 2))])
        with pytest.raises(EngineError, match="differ from the snapshot in engine-1: layer"):
            await fleet.controller.check_weights("compare")
        checksums = await fleet.controller.check_weights("checksum")
        for engine in fleet.engines:
            engine.script(refuse("weights_checker", 500, "out of memory"))
        with pytest.raises(EngineError, match=r"not checked \(checksum\): engine-\d: .*memory.*; engine-\d: .*memory"):
            await fleet.controller.check_weights("checksum")
        assert checksums["engine-0"][0].checksums.keys() == fleet.engines[0].base.keys()
