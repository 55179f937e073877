"""Engines, groups and fleets that are stopped at a bad moment, and started again after a bad end."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.config.layout import ExternalEngine
from asyncrl.errors import EngineError
from asyncrl.host import ProcessExit, ProcessSpec
from asyncrl.inference.engines import group, keeper
from asyncrl.inference.external.keeper import ExternalKeeper
from tests.inference.conftest import Fleet, StartFleet, cpu_layout, dispose_within, eventually
from tests.inference.engines.test_recovery import publish, serves
from tests.inference.test_eval_fleet import with_eval_fleet
from tests.inference.test_models import beside
from tests.scripted import ScriptedEngine, ScriptedRouter, hang

pytestmark = pytest.mark.anyio


def end_slowly(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A process takes its time to end, as a real engine does after SIGTERM."""
    stop = fleet.host.stop

    async def slow(name: str, grace_s: float) -> ProcessExit:
        await anyio.sleep(seconds)
        return await stop(name, grace_s)

    monkeypatch.setattr(fleet.host, "stop", slow)


def end_when_told(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> tuple[anyio.Event, anyio.Event]:
    """Processes that are to end set the first event, and end once the second is set."""
    asked, may_end, stop = anyio.Event(), anyio.Event(), fleet.host.stop

    async def slow(name: str, grace_s: float) -> ProcessExit:
        asked.set()
        await may_end.wait()
        return await stop(name, grace_s)

    monkeypatch.setattr(fleet.host, "stop", slow)
    return asked, may_end


def refuse_to_start(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
    """The machine is out of something for a while."""
    spawn, left = fleet.host.spawn, [times]

    async def spawn_or_not(spec: ProcessSpec) -> int:
        if spec.name == name and left[0]:
            left[0] -= 1
            raise EngineError(f"{name}: cannot be started: No space left on device")
        return await spawn(spec)

    monkeypatch.setattr(fleet.host, "spawn", spawn_or_not)


def restartings(fleet: Fleet, name: str) -> list[dict[str, Any]]:
    return [e for e in fleet.events.recent if e["kind"] == "process_restarting" and e["name"] == name]


def given_up(fleet: Fleet) -> list[str]:
    return [event["name"] for event in fleet.events.recent if event["kind"] == "process_given_up"]


# an engine is stopped while something else is about to happen to it


@pytest.mark.parametrize("while_it", ["starts", "catches up", "is about to be registered"])
async def test_an_engine_that_is_stopped_on_its_way_into_service_never_gets_there(
    start_fleet: StartFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, while_it: str
) -> None:
    async with start_fleet(2, restarts=5, weights={"verify": "never"}) as fleet:
        await publish(fleet, "0.0", tmp_path)
        engine = fleet.engines[0]
        match while_it:
            case "starts":
                engine.script(hang("generate", seconds=0.3))
            case "catches up":
                engine.script(hang("update_weights_from_disk", seconds=0.3))
            case "is about to be registered":
                fleet.router.faults.add(hang("add_worker", seconds=0.3))
        await fleet.host.kill("engine-0")
        await eventually(lambda: engine.lives == 2)
        if while_it == "catches up":
            await eventually(lambda: fleet.states()[0] == "updating")
        if while_it == "is about to be registered":
            await eventually(lambda: fleet.states()[0] == "serving")
        end_slowly(fleet, monkeypatch, 0.8)
        keeper_of_it = fleet.controller._started.actor
        await keeper_of_it.stop_engine(keeper_of_it.engines[0])
        assert fleet.states() == ["stopped", "serving"]
        assert not engine.alive
        await eventually(lambda: fleet.router.workers == [fleet.engines[1].url])
        await anyio.sleep(0.3)
        assert fleet.states() == ["stopped", "serving"]
        assert fleet.router.workers == [fleet.engines[1].url]
    assert fleet.failures == []


async def test_an_engine_that_is_being_stopped_is_in_no_publication(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_fleet(2, restarts=5) as fleet:
        await publish(fleet, "0.0", None)
        await fleet.host.kill("engine-0")
        await eventually(lambda: fleet.states()[0] == "pending_weights")
        asked, may_end = end_when_told(fleet, monkeypatch)
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(fleet.controller.stop_cell, "engine-0")
            await asked.wait()
            lease = await fleet.controller.begin_weight_update("0.1")
            assert [engine.engine_id for engine in lease.engines] == ["engine-1"]
            await fleet.controller.abort_weight_update(lease.lease_id, {}, untouched=True)
            may_end.set()
        assert fleet.states() == ["stopped", "serving"]


@pytest.mark.parametrize("state", ["starting", "pending_weights", "dead"])
async def test_an_engine_that_is_being_stopped_is_started_only_afterwards(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    async with start_fleet(2, restarts=5) as fleet:
        await publish(fleet, "0.0", None)
        if state == "starting":
            fleet.engines[0].script(hang("generate", seconds=5.0))
        if state == "dead":
            refuse_to_start(fleet, monkeypatch, "engine-0", times=3)
        await fleet.host.kill("engine-0")
        await eventually(
            lambda: fleet.states()[0] == state and (state != "dead" or bool(restartings(fleet, "engine-0")))
        )
        asked, may_end = end_when_told(fleet, monkeypatch)
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(fleet.controller.stop_cell, "engine-0")
            await asked.wait()
            with pytest.raises(EngineError, match="engine-0 cannot be started: it is being stopped"):
                await fleet.controller.start_cell("engine-0")
            may_end.set()
        assert fleet.states() == ["stopped", "serving"]
        monkeypatch.undo()
        fleet.engines[0].faults.clear()
        await fleet.controller.start_cell("engine-0")
        await eventually(lambda: fleet.states()[0] == "pending_weights")
        assert fleet.host.spawned.count("engine-0") >= 2
    assert fleet.failures == []


async def test_stopping_an_engine_whose_end_is_being_taken_in_is_no_failure(start_fleet: StartFleet) -> None:
    async with start_fleet(1) as fleet:
        await publish(fleet, "0.0", None)
        fleet.router.faults.add(hang("workers", seconds=0.5))  # so that taking it out of the router takes a while
        await fleet.host.kill("engine-0")
        await eventually(lambda: fleet.states() == ["dead"])
        await fleet.controller.stop_cell("engine-0", force=True)
        await anyio.sleep(0.7)
        assert fleet.states() == ["stopped"]
        await fleet.controller.start_cell("engine-0")
        await eventually(lambda: fleet.states() == ["pending_weights"])
    assert fleet.failures == []


# a process that cannot be started


async def test_an_engine_that_cannot_be_started_again_is_tried_with_growing_pauses(
    start_fleet: StartFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_fleet(2, restarts=5) as fleet:
        await publish(fleet, "0.0", tmp_path)
        refuse_to_start(fleet, monkeypatch, "engine-0", times=1)
        await fleet.host.kill("engine-0")
        await eventually(lambda: serves(fleet, 0, "0.0") and fleet.engines[0].lives == 2)
        told = restartings(fleet, "engine-0")
        assert [event["restarts"] for event in told] == [1, 2]
        assert told[1]["delay_s"] > 0.0
        assert "No space left" in told[1]["reason"]
    assert fleet.failures == []


async def test_an_engine_that_can_never_be_started_again_is_given_up_and_the_others_go_on(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_fleet(2, restarts=1) as fleet:
        await publish(fleet, "0.0", None)
        refuse_to_start(fleet, monkeypatch, "engine-0", times=100)
        await fleet.host.kill("engine-0")
        await eventually(lambda: given_up(fleet) == ["engine-0"])
        assert fleet.states() == ["dead", "serving"]
        monkeypatch.undo()
        await fleet.controller.start_cell("engine-0")
        await eventually(lambda: fleet.states() == ["pending_weights", "serving"])
    assert fleet.failures == []


async def test_an_engine_that_cannot_be_started_at_all_ends_the_job_with_the_reason(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(fleet: Fleet) -> None:
        refuse_to_start(fleet, monkeypatch, "engine-0", times=100)

    async with start_fleet(1, prepare=prepare, restarts=5) as fleet:
        with pytest.raises(EngineError, match="No space left on device"):
            await fleet.controller.wait_ready()
        assert fleet.states() == ["dead"]


async def test_a_router_that_cannot_be_started_again_is_tried_and_then_given_up_with_an_event(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_fleet(1, restarts=2) as fleet:
        await publish(fleet, "0.0", None)
        refuse_to_start(fleet, monkeypatch, "router", times=1)
        await fleet.host.signal("router", signal.SIGKILL)
        await eventually(lambda: fleet.router.lives == 2 and serves(fleet, 0, "0.0"))
        assert [event["restarts"] for event in restartings(fleet, "router")] == [1, 2]
        await fleet.host.signal("router", signal.SIGKILL)
        await eventually(lambda: bool(fleet.failures))
        assert given_up(fleet) == ["router"]


# what is waited for when nobody is left


async def test_an_engine_stopped_before_it_was_ever_ready_leaves_a_fleet_that_counts_as_started(
    start_fleet: StartFleet,
) -> None:
    def prepare(fleet: Fleet) -> None:
        fleet.engines[2].script(hang("generate", times=None))

    async with start_fleet(3, prepare=prepare) as fleet:
        await eventually(lambda: fleet.states() == ["pending_weights", "pending_weights", "starting"])
        assert fleet.controller.statistics().start_s is None
        await fleet.controller.stop_cell("engine-2")
        assert fleet.controller.statistics().start_s is not None
        assert fleet.kinds().count("fleet_ready") == 1
        await publish(fleet, "0.0", None)
        await fleet.host.kill("engine-1")  # given up: the job had started, so the other goes on
        await eventually(lambda: given_up(fleet) == ["engine-1"])
        await publish(fleet, "0.1", None)
        assert serves(fleet, 0, "0.1")
    assert fleet.failures == []


async def test_recovery_is_not_reported_where_no_engine_is_to_run(start_fleet: StartFleet) -> None:
    async with start_fleet(1) as fleet:
        await publish(fleet, "0.0", None)
        await fleet.controller.stop_cell("engine-0", force=True)
        for wait in (fleet.controller.recover_updatable_engines, fleet.controller.wait_ready):
            with anyio.fail_after(10), pytest.raises(EngineError, match=r"no engine runs for .*start_cell"):
                await wait()


async def test_an_eval_fleet_that_failed_starts_anew_when_it_is_next_asked_for(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with with_eval_fleet(start_fleet, tmp_path) as evaluated:
        pin = evaluated.fleet.controller.pin_eval_fleet
        evaluated.engines[0].exit_code = 1
        with pytest.raises(EngineError, match=r"eval-0 .* exited with code 1"):
            await pin(evaluated.checkpoint("0.3"), "0.3")
        evaluated.engines[0].exit_code = None
        await pin(evaluated.checkpoint("0.3"), "0.3")
        assert evaluated.serve("0.3")
        evaluated.router.exit_code = 1  # the router's turn: given up once it was tried as often as allowed
        ready = evaluated.fleet.kinds().count("fleet_ready")
        for _ in range(4):
            if evaluated.router.alive:
                await evaluated.fleet.host.kill("router-eval")
            await eventually(lambda: not evaluated.router.alive)
        await eventually(lambda: "router-eval" in given_up(evaluated.fleet), 10)
        evaluated.router.exit_code = None
        await pin(evaluated.checkpoint("0.4"), "0.4")
        assert evaluated.serve("0.4")
        assert evaluated.fleet.kinds().count("fleet_ready") == ready + 1


# the whole fleet ends


def with_everything(fleet: Fleet) -> None:
    fleet.host.servers |= {"judge-0": ScriptedEngine(), "router-judge": ScriptedRouter()}
    fleet.host.servers |= {"eval-0": ScriptedEngine(), "router-eval": ScriptedRouter()}


async def test_all_groups_end_at_once(start_fleet: StartFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = replace(cpu_layout(2), beside={"judge": beside("judge", 1), "eval": beside("eval", 1)})
    settings: dict[str, Any] = {"models": {"judge": {}}, "eval": {"fleet": {}}}
    async with start_fleet(2, layout=layout, prepare=with_everything, **settings) as fleet:
        await fleet.controller.wait_ready()
        with pytest.raises(EngineError, match=r"weights 0\.3 cannot be evaluated"):  # its engines run all the same
            await fleet.controller.pin_eval_fleet(tmp_path / "absent", "0.3")
        end_slowly(fleet, monkeypatch, 0.7)
        await dispose_within(fleet, 4.0)  # one after another: three groups of router, then engines
        assert set(fleet.states()) == {"stopped"}
        assert not any(server.alive for server in fleet.host.servers.values())
    assert fleet.failures == []


async def test_a_process_that_does_not_end_holds_up_the_end_of_the_fleet_for_a_bounded_time(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "DISPOSE_TIMEOUT_S", 0.3)
    async with start_fleet(2) as fleet:
        await publish(fleet, "0.0", None)
        stop = fleet.host.stop

        async def never(name: str, grace_s: float) -> ProcessExit:
            if name == "engine-0":
                await anyio.sleep_forever()
            return await stop(name, grace_s)

        monkeypatch.setattr(fleet.host, "stop", never)
        await dispose_within(fleet, 10)
        assert not fleet.engines[1].alive and not fleet.router.alive


async def test_a_keeper_that_does_not_return_holds_up_nobody(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "RETURN_TIMEOUT_S", 0.2)

    returns = anyio.Event()

    async def stuck(keeper: ExternalKeeper) -> None:
        with anyio.CancelScope(shield=True):
            await returns.wait()

    monkeypatch.setattr(ExternalKeeper, "_live", stuck)
    async with anyio.create_task_group() as tasks:
        stranger = ScriptedEngine()
        await tasks.start(stranger.run)
        layout = replace(cpu_layout(1), external=(ExternalEngine("external-0", stranger.url, "broadcast"),))
        async with start_fleet(1, layout=layout) as fleet:
            await eventually(lambda: fleet.states()[0] == "pending_weights")
            await dispose_within(fleet, 10)
            assert fleet.states() == ["stopped", "stopped"]
            returns.set()
        stranger.kill()


async def test_a_fleet_that_was_disposed_of_starts_no_engines_for_an_evaluation(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with with_eval_fleet(start_fleet, tmp_path) as evaluated:
        await evaluated.fleet.controller.dispose()
        with pytest.raises(EngineError, match="disposed"):
            await evaluated.fleet.controller.pin_eval_fleet(evaluated.checkpoint("0.3"), "0.3")
        assert not any(name.startswith("eval") for name in evaluated.fleet.host.spawned)
