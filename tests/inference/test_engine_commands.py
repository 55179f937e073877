"""`asyncrl cell` and `asyncrl health` against a running job over scripted engines."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.config import Config
from asyncrl.config.layout import ExternalEngine
from asyncrl.control.client import ask
from asyncrl.control.protocol import CarriedOut, Health, SetProbing, ShowHealth, StartCell, StopCell
from asyncrl.control.server import serve_control
from asyncrl.errors import ControlError
from asyncrl.inference.engine_commands import EngineCommands, refuse_without_engines
from asyncrl.run_directory import RunDirectory
from tests.inference.conftest import Fleet, StartFleet, cpu_layout, eventually
from tests.inference.engines.test_capacity import ENDLESS, request_on, slow
from tests.inference.engines.test_recovery import FAST, publish, serves
from tests.scripted import ScriptedEngine, hang

pytestmark = pytest.mark.anyio

MAIN = "from asyncrl.cli import main; main()"
PATIENT_S = 60.0


@dataclass
class CommandedJob:
    """A fleet whose job takes commands."""

    fleet: Fleet
    run: Path

    async def ask(self, request: Any, timeout_s: float = PATIENT_S) -> Any:
        return await anyio.to_thread.run_sync(ask, self.run, request, timeout_s)

    async def cli(self, *words: str) -> tuple[int, str]:
        """Exit code and output of `asyncrl words... `; RUN stands for the run directory."""
        args = [str(self.run) if word == "RUN" else word for word in words]
        env = os.environ | {"COLUMNS": "120"}
        with anyio.fail_after(PATIENT_S):
            done = await anyio.run_process([sys.executable, "-c", MAIN, *args], check=False, env=env)
        return done.returncode, (done.stdout + done.stderr).decode()


@asynccontextmanager
async def commanded(
    start_fleet: StartFleet, tmp_path: Path, engines: int = 2, **settings: Any
) -> AsyncIterator[CommandedJob]:
    with RunDirectory.open(Config.model_validate({"run": {"dir": tmp_path / "run"}})) as run:
        async with start_fleet(engines, **settings) as fleet, anyio.create_task_group() as job:
            serve_control(job, run.control, EngineCommands(fleet.controller))
            yield CommandedJob(fleet, run.path)
            job.cancel_scope.cancel()


async def test_health_shows_every_engine_with_its_state_version_restarts_and_address(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with commanded(start_fleet, tmp_path, restarts=3) as job:
        await publish(job.fleet, "0.0", tmp_path)
        await job.fleet.host.kill("engine-1")
        await eventually(lambda: job.fleet.engines[1].lives == 2 and serves(job.fleet, 1, "0.0"))
        await job.fleet.controller.stop_cell("engine-0")
        code, told = await job.cli("health", "RUN")
        assert code == 0, told
        first, heading, *rows = told.splitlines()
        assert first == "published weights: 0.0; health probes: on"
        assert heading.split() == ["engine", "model", "state", "version", "restarts", "address"]
        urls = [engine.url for engine in job.fleet.engines]
        assert rows[0].split() == ["engine-0", "actor", "stopped", "0.0", "0", urls[0]]
        assert rows[1].split() == ["engine-1", "actor", "serving", "0.0", "1", urls[1]]


async def test_probes_are_paused_and_resumed(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with commanded(start_fleet, tmp_path, 1, **FAST) as job:
        await publish(job.fleet, "0.0", None)
        code, told = await job.cli("health", "pause", "RUN")
        assert (code, told) == (0, "engines are not probed until they are resumed (asyncrl health resume)\n")
        health = await job.ask(ShowHealth())
        assert isinstance(health, Health) and health.probes_paused
        await anyio.sleep(0.3)  # a probe that was under way
        job.fleet.engines[0].calls.clear()
        await anyio.sleep(0.5)
        assert "health_generate" not in job.fleet.engines[0].calls
        assert await job.ask(SetProbing(paused=False)) == CarriedOut("engines are probed again")
        await eventually(lambda: "health_generate" in job.fleet.engines[0].calls)
        assert not (await job.ask(ShowHealth())).probes_paused


async def test_an_engine_is_stopped_after_its_requests_and_started_again(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with commanded(start_fleet, tmp_path, prepare=slow) as job:
        fleet = job.fleet
        await publish(fleet, "0.0", tmp_path)
        answers: list[tuple[int, str]] = []

        async def stop() -> None:
            answers.append(await job.cli("cell", "stop", "RUN", "engine-0"))

        async with request_on(fleet.engines[0], ENDLESS), anyio.create_task_group() as tasks:
            tasks.start_soon(stop)
            with anyio.fail_after(PATIENT_S):
                await fleet.controller._started.actor.wait_until(lambda: fleet.states() == ["draining", "serving"])
            assert answers == []
            assert [row.state for row in (await job.ask(ShowHealth())).engines] == ["draining", "serving"]
            fleet.engines[0].generation.finish()
        assert answers == [(0, "engine-0 is stopped\n")]
        assert fleet.states() == ["stopped", "serving"]
        assert await job.cli("cell", "start", "RUN", "--wait") == (0, "engine-0 serves\n")
        assert serves(fleet, 0, "0.0") and fleet.engines[0].lives == 2


async def test_without_a_stopped_engine_a_new_one_is_started(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with commanded(start_fleet, tmp_path, 1) as job:
        await publish(job.fleet, "0.0", tmp_path)
        added = ScriptedEngine()
        added.script(hang("generate", seconds=0.3))
        job.fleet.engines.append(added)
        job.fleet.host.servers["engine-1"] = added
        told = await job.ask(StartCell())
        assert told == CarriedOut("engine-1 is starting; it serves once it has the published weights")
        assert job.fleet.states() == ["serving", "starting"]
        await eventually(lambda: serves(job.fleet, 1, "0.0"))


async def test_an_engine_that_comes_to_nothing_is_told_to_the_command_that_waits(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with commanded(start_fleet, tmp_path, 1) as job:
        await publish(job.fleet, "0.0", tmp_path)
        broken = ScriptedEngine()
        broken.exit_code = 1
        job.fleet.host.servers["engine-1"] = broken
        with pytest.raises(ControlError, match="engine-1 did not come to serve: it is dead"):
            await job.ask(StartCell(wait=True))
        assert job.fleet.states() == ["serving", "dead"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cell", "stop", "RUN", "engine-7"], "there is no engine engine-7; there are engine-0"),
        (["cell", "stop", "RUN", "engine-0"], "engine-0 was not stopped: it is the last engine that serves"),
        (["cell", "start", "RUN", "engine-0"], "engine-0 cannot be started: it is serving"),
        (["cell", "start", "RUN", "engine-7"], "there are engine-0, and engine-1 is next"),
    ],
)
async def test_what_the_controller_refuses_is_one_message_and_exit_code_1(
    start_fleet: StartFleet, tmp_path: Path, words: list[str], told: str
) -> None:
    async with commanded(start_fleet, tmp_path, 1) as job:
        await publish(job.fleet, "0.0", None)
        code, output = await job.cli(*words)
        assert code == 1
        assert output.startswith("error: ") and told in output and output.count("\n") == 1
        assert job.fleet.states() == ["serving"]


async def test_the_last_engine_is_stopped_by_force_and_comes_back(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with commanded(start_fleet, tmp_path, 1) as job:
        await publish(job.fleet, "0.0", tmp_path)
        assert await job.cli("cell", "stop", "RUN", "engine-0", "--force") == (0, "engine-0 is stopped\n")
        assert job.fleet.states() == ["stopped"]
        await job.ask(StartCell("engine-0", wait=True))
        assert serves(job.fleet, 0, "0.0")


async def test_two_commands_at_once_leave_one_engine_that_serves(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with commanded(start_fleet, tmp_path) as job:
        await publish(job.fleet, "0.0", None)
        told: list[str] = []

        async def stop(engine: str) -> None:
            try:
                told.append((await job.ask(StopCell(engine))).message)
            except ControlError as error:
                told.append(str(error))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop, "engine-0")
            tasks.start_soon(stop, "engine-1")
        assert sorted(job.fleet.states()) == ["serving", "stopped"]
        assert (
            sum("is stopped" in line for line in told) == sum("last engine that serves" in line for line in told) == 1
        )


async def test_an_external_engine_leaves_and_joins_again(start_fleet: StartFleet, tmp_path: Path) -> None:
    stranger = ScriptedEngine()
    async with anyio.create_task_group() as tasks:
        await tasks.start(stranger.run)
        layout = replace(cpu_layout(1), external=(ExternalEngine("external-0", stranger.url, "broadcast"),))
        async with commanded(start_fleet, tmp_path, 1, layout=layout) as job:
            job.fleet.engines.append(stranger)
            await publish(job.fleet, "0.0", None)
            assert await job.ask(StopCell("external-0")) == CarriedOut("external-0 is stopped")
            assert job.fleet.states() == ["serving", "stopped"] and stranger.alive
            assert (await job.ask(StartCell())).message.startswith("external-0 is starting")
            await eventually(lambda: job.fleet.states() == ["serving", "pending_weights"])
        stranger.kill()


async def test_a_job_that_ends_while_an_engine_drains_is_told(start_fleet: StartFleet, tmp_path: Path) -> None:
    told: list[str] = []
    async with anyio.create_task_group() as outside, commanded(start_fleet, tmp_path, prepare=slow) as job:
        fleet = job.fleet
        await publish(fleet, "0.0", None)

        async def stop() -> None:
            try:
                told.append((await job.ask(StopCell("engine-0"))).message)
            except ControlError as error:
                told.append(str(error))

        async with request_on(fleet.engines[0], ENDLESS):
            outside.start_soon(stop)
            await eventually(lambda: fleet.states() == ["draining", "serving"])
            await fleet.controller.dispose()
            await eventually(lambda: told != [])
    assert told == ["engine-0 is stopped"]  # with all others
    assert fleet.failures == []


async def test_half_a_job_without_engines_says_so(tmp_path: Path) -> None:
    with RunDirectory.open(Config.model_validate({"run": {"dir": tmp_path / "run"}})) as run:
        async with anyio.create_task_group() as job:
            serve_control(job, run.control, refuse_without_engines)
            for request in (ShowHealth(), StartCell(), StopCell("engine-0"), SetProbing(paused=True)):
                with pytest.raises(ControlError, match=r"^this job runs without engines \(debug\.train_only\)$"):
                    await anyio.to_thread.run_sync(ask, run.path, request, PATIENT_S)
            job.cancel_scope.cancel()


async def test_no_job_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    with RunDirectory.open(Config.model_validate({"run": {"dir": tmp_path / "run"}})) as run:
        pass
    args = ["cell", "stop", str(run.path), "engine-0"]
    done = await anyio.run_process([sys.executable, "-c", MAIN, *args], check=False)
    assert (done.returncode, done.stderr.decode()) == (2, f"error: {run.path}: no job is running there\n")
