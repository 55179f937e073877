"""Real engines and a real router under load: processes are killed and stopped, and every request ends well."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio
import psutil
import pytest

from asyncrl.data.fleet import EngineState
from asyncrl.inference.sglang.engine_api import EngineApi
from tests.results import keep
from tests.system.conftest import RealFleet, started_fleet
from tests.system.jobs import command_line
from tests.system.load import TOKENS, Load, continuous_load

pytestmark = [pytest.mark.anyio, pytest.mark.system]

REQUESTS = 32
REISSUE_LIMIT_S = 1.0
HEALTH = {"interval_s": 1.0, "timeout_s": 6.0, "failures": 2}
RECOVERY_TIMEOUT_S = 200.0


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault, how soon it was known, and how soon after that the requests that it cost were sent again."""

    fault: str
    detection_s: float
    reissue_s: float | None
    """Of the last of them that was lost for the first time; None where there was none."""
    lost: int
    """Requests that failed of it and were sent again."""


def processes(fleet: RealFleet, port: str) -> psutil.Process:
    """The process that the host started on `port`."""
    for process in psutil.Process(fleet.host.pid).children(recursive=True):
        line = command_line(process)
        if "--port" in line and line[line.index("--port") + 1] == port:
            return process
    raise AssertionError(f"nothing was started on port {port}")


def strike(fleet: RealFleet, fault: str, engine: int) -> None:
    urls = [status.endpoint.url for status in fleet.controller.fleet().engines]
    url = fleet.controller.router_url if fault == "kill router" else urls[engine]
    target = processes(fleet, url.rpartition(":")[2])
    if "scheduler" in fault:
        target = next(
            p for p in target.children(recursive=True) if "".join(command_line(p)[:1]).startswith("sglang::scheduler")
        )
    os.kill(target.pid, signal.SIGSTOP if fault.startswith("stop") else signal.SIGKILL)


def detected_at(fleet: RealFleet, since: int) -> float | None:
    """When the controller knew (monotonic seconds)."""
    for event in list(fleet.events.recent)[since:]:
        down = event["kind"] == "engine_state" and event["state"] in ("dead", "quarantined")
        if down or (event["kind"] == "process_restarting" and event["name"] == "router"):
            return float(event["time"]) - (time.time() - anyio.current_time())
    return None


async def strike_and_watch(fleet: RealFleet, load: Load, fault: str, engine: int) -> Strike:
    """Strikes at a random moment of the load and waits until what it cost was sent again.

    Those that were lost for the first time within what is promised: who was lost before waits longer.
    """
    await load.progress(random.randrange(REQUESTS))
    events, failures = len(fleet.events.recent), len(load.failures)
    struck_at = anyio.current_time()
    strike(fleet, fault, engine)
    detected: float | None = None
    with anyio.fail_after(60):
        while detected is None:
            await anyio.sleep(0.002)
            detected = detected_at(fleet, events)
    await anyio.sleep(2 * REISSUE_LIMIT_S)
    lost: dict[str, float] = {}
    once: set[str] = set()
    """Lost for the first time."""
    for at, failed in load.failures[failures:]:
        if at <= detected + REISSUE_LIMIT_S:
            if failed.sample_id not in lost and failed.request_attempt == 0:
                once.add(failed.sample_id)
            lost.setdefault(failed.sample_id, at)
    sent_again: dict[str, float] = {}
    with anyio.fail_after(20):
        while sent_again.keys() != lost.keys():
            for at, sample_id in load.sent_again:  # of one that an earlier strike had cost already, the next time
                if at >= lost.get(sample_id, math.inf):
                    sent_again.setdefault(sample_id, at)
            await anyio.sleep(0.1)
    reissue_s = max(sent_again[sample_id] for sample_id in once) - detected if once else None
    assert reissue_s is None or reissue_s < REISSUE_LIMIT_S
    return Strike(fault, round(detected - struck_at, 3), None if reissue_s is None else round(reissue_s, 3), len(lost))


async def recovery(fleet: RealFleet, load: Load) -> float:
    """Publishes new weights while engines are away and waits until all serve them; seconds."""
    began = anyio.current_time()
    answers = len(load.answers)
    version = await fleet.publish_from_disk(fleet.models[fleet.publications % 2])
    published_at = anyio.current_time()
    with anyio.fail_after(RECOVERY_TIMEOUT_S):
        await fleet.controller.recover_updatable_engines()
    recovered_s = anyio.current_time() - began
    statuses = fleet.controller.fleet().engines
    assert [(s.state, s.version) for s in statuses] == [(EngineState.SERVING, version)] * len(statuses)
    for status in statuses:
        async with EngineApi.open(status.endpoint.engine_id, status.endpoint.url) as client:
            assert (await client.generate([5])).meta_info.weight_version == version
    await load.progress(2 * REQUESTS)
    for answer in load.answers[answers:]:
        assert len(answer.generation.output_ids) == TOKENS
        versions = {span.version for span in answer.generation.versions}
        assert not [v for v in versions if v.startswith("torn")]
        if answer.sent_at > published_at:
            assert versions == {version}
    return recovered_s


@asynccontextmanager
async def fleet_under_load(models: tuple[Path, Path], run_dir: Path) -> AsyncIterator[tuple[RealFleet, Load]]:
    """Two engines that serve, and their load; at the end of it no process of a former life is left."""
    async with started_fleet(models, run_dir, health=HEALTH, num_engines=2, max_restarts=50) as fleet:
        await fleet.publish_from_disk(models[0])
        before = len(psutil.Process(fleet.host.pid).children(recursive=True))
        async with continuous_load(fleet.controller.router_url, REQUESTS) as load:
            await load.progress(REQUESTS)
            yield fleet, load
        assert len(psutil.Process(fleet.host.pid).children(recursive=True)) <= before
    assert fleet.failures == []


@pytest.mark.timeout(400)
async def test_every_request_ends_well_whatever_is_killed_or_stopped(
    tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    async with fleet_under_load(tiny_models, tmp_path) as (fleet, load):
        print(await strike_and_watch(fleet, load, "kill scheduler", 0))
        print(await strike_and_watch(fleet, load, "kill router", 0))  # while the engine is away
        print(await strike_and_watch(fleet, load, "stop engine", 1))  # now nobody serves
        print(await recovery(fleet, load))
        print(await strike_and_watch(fleet, load, "kill engine", 0))


@pytest.mark.long
@pytest.mark.timeout(5400)
async def test_every_request_ends_well_ten_times_over(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    kinds = ["kill scheduler", "kill engine", "stop engine", "kill router"]
    rounds = []
    async with fleet_under_load(tiny_models, tmp_path) as (fleet, load):
        for number in range(10 * len(kinds)):
            struck = await strike_and_watch(fleet, load, kinds[number % len(kinds)], number % 2)
            rounds.append(asdict(struck) | {"recovery_s": round(await recovery(fleet, load), 1)})
            print(rounds[-1])
            found = {"requests_in_flight": REQUESTS, "answered": len(load.answers), "failed": 0, "rounds": rounds}
            keep("recovery", found)
