"""Engines that somebody else runs: they join by url, are never ended, and come back as they went."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest

from asyncrl.config.layout import ExternalEngine
from asyncrl.errors import EngineError
from asyncrl.inference.updates import deadlines
from tests.inference.conftest import Fleet, StartFleet, cpu_layout, dispose_within, eventually
from tests.inference.engines.test_recovery import FAST, publish, serves
from tests.scripted import ScriptedEngine, freeze, refuse

pytestmark = pytest.mark.anyio


class Stranger:
    """An engine in the hands of the test: no host knows it."""

    def __init__(self, engine: ScriptedEngine, tasks: anyio.abc.TaskGroup) -> None:
        self.engine = engine
        self._tasks = tasks

    async def start(self) -> None:
        port = int(self.engine.url.rpartition(":")[2] or 0) if self.engine.url else 0
        await self._tasks.start(self.engine.run, port)

    async def restart(self) -> None:
        self.engine.kill()
        await eventually(lambda: self.engine._runner is None)
        await self.start()


@asynccontextmanager
async def beside_one_stranger(
    start_fleet: StartFleet, *, own: int = 1, tensor_parallel: int = 1, **settings: Any
) -> AsyncIterator[tuple[Fleet, Stranger]]:
    """A fleet of `own` engines and one external, which comes last in its lists; it outlives the fleet."""
    async with anyio.create_task_group() as tasks:
        stranger = Stranger(ScriptedEngine(tensor_parallel=tensor_parallel), tasks)
        await stranger.start()
        external = ExternalEngine("external-0", stranger.engine.url, "broadcast")
        layout = replace(cpu_layout(own), external=(external,))
        async with start_fleet(own, layout=layout, **({"restarts": 3} | settings)) as fleet:
            fleet.engines.append(stranger.engine)
            yield fleet, stranger
        stranger.engine.kill()
    assert fleet.failures == []


async def test_an_external_engine_takes_weights_as_any_other_and_its_ranks_are_asked_for(
    start_fleet: StartFleet,
) -> None:
    async with beside_one_stranger(start_fleet, tensor_parallel=2) as (fleet, stranger):
        await fleet.controller.wait_ready()
        status = fleet.controller.fleet().engines[1]
        assert (status.endpoint.engine_id, status.endpoint.tensor_parallel) == ("external-0", 2)
        await publish(fleet, "0.0", None)
        assert serves(fleet, 0, "0.0") and serves(fleet, 1, "0.0")
        assert stranger.engine.weights.digest == fleet.engines[0].weights.digest
        assert "external-0" not in fleet.host.spawned


async def test_a_fleet_may_be_all_external(start_fleet: StartFleet) -> None:
    async with beside_one_stranger(start_fleet, own=0) as (fleet, _):
        await publish(fleet, "0.0", None)
        assert serves(fleet, 0, "0.0")
        await fleet.controller.prepare_rollout(0)


async def test_an_engine_that_was_left_paused_with_an_open_session_joins_in_order(start_fleet: StartFleet) -> None:
    async with anyio.create_task_group() as tasks:
        engine = ScriptedEngine()
        await Stranger(engine, tasks).start()
        await engine.generation.pause("retract")
        engine.weights.session = True
        layout = replace(cpu_layout(0), external=(ExternalEngine("external-0", engine.url, "broadcast"),))
        async with start_fleet(0, layout=layout) as fleet:
            fleet.engines.append(engine)
            await fleet.controller.wait_ready()
            assert not engine.paused and not engine.session
            await publish(fleet, "0.0", None)
        engine.kill()


@pytest.mark.parametrize("way", ["dies", "hangs"])
async def test_an_external_engine_that_goes_away_is_found_by_probes_and_joins_anew_when_it_answers(
    start_fleet: StartFleet, tmp_path: Path, way: str
) -> None:
    weights = {"directory": tmp_path}
    async with beside_one_stranger(start_fleet, weights=weights, **FAST) as (fleet, stranger):
        await publish(fleet, "0.0", tmp_path)
        if way == "dies":
            stranger.engine.kill()
        else:
            stranger.engine.script(freeze("health_generate"))
        await eventually(lambda: fleet.states()[1] in ("quarantined", "starting"))
        await eventually(lambda: fleet.router.workers == [fleet.engines[0].url])
        await publish(fleet, "0.1", tmp_path)  # goes on without it
        if way == "dies":
            await eventually(lambda: stranger.engine._runner is None)
            await stranger.start()
        else:
            assert stranger.engine.alive  # nobody killed it
            stranger.engine.thaw()
        await eventually(lambda: serves(fleet, 1, "0.1"))
        assert fleet.controller.fleet().engines[1].endpoint.generation >= 1
        assert stranger.engine.weights.digest == fleet.engines[0].weights.digest


async def test_without_a_shared_directory_it_waits_for_the_next_publication(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with beside_one_stranger(start_fleet, **FAST) as (fleet, stranger):
        await publish(fleet, "0.0", tmp_path)
        await stranger.restart()
        await eventually(lambda: fleet.states() == ["serving", "pending_weights"])
        assert "update_weights_from_disk" not in stranger.engine.calls
        assert fleet.router.workers == [fleet.engines[0].url]
        await publish(fleet, "0.1", tmp_path)
        assert serves(fleet, 1, "0.1")


async def test_an_engine_that_leaves_is_not_counted_on_by_one_that_cannot_load_the_copy(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with beside_one_stranger(start_fleet, **FAST) as (fleet, stranger):
        await publish(fleet, "0.0", tmp_path)
        await stranger.restart()
        await eventually(lambda: fleet.states() == ["serving", "pending_weights"])
        assert not fleet.controller.fleet().needs_publication
        fleet.engines[0].script(refuse("flush_cache", times=None))  # it has a request that does not end
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(partial(fleet.controller.stop_cell, "engine-0", force=True))
            with anyio.fail_after(10):
                await fleet.controller.wait_publication_needed()
            assert fleet.states() == ["draining", "pending_weights"]
            task_group.cancel_scope.cancel()


async def test_one_that_restarts_unseen_between_two_probes_serves_no_old_weights_for_long(
    start_fleet: StartFleet,
) -> None:
    """Nobody tells that its process is another one by now; its version stamp does."""
    async with beside_one_stranger(start_fleet, **FAST) as (fleet, stranger):
        await publish(fleet, "0.0", None)
        await fleet.controller.health_monitoring_pause()
        await stranger.restart()
        assert stranger.engine.version == "default"
        await fleet.controller.health_monitoring_resume()
        await eventually(lambda: fleet.states() == ["serving", "pending_weights"])
        assert fleet.router.workers == [fleet.engines[0].url]


async def test_an_external_engine_that_refuses_weights_is_unrouted_and_put_in_order(start_fleet: StartFleet) -> None:
    async with beside_one_stranger(start_fleet) as (fleet, stranger):
        await publish(fleet, "0.0", None)
        stranger.engine.script(refuse("begin_weight_update"))
        lease = await fleet.controller.begin_weight_update("0.1")
        assert [engine.engine_id for engine in lease.engines] == ["engine-0"]
        await eventually(lambda: not stranger.engine.paused)
        await fleet.controller.abort_weight_update(lease.lease_id, {}, untouched=True)
        await publish(fleet, "0.1", None)
        await eventually(lambda: fleet.states() == ["serving", "pending_weights"] or serves(fleet, 1, "0.1"))
        await publish(fleet, "0.2", None)
        assert serves(fleet, 0, "0.2") and serves(fleet, 1, "0.2")
        assert stranger.engine.lives == 1


async def test_disposal_leaves_it_alive_unpaused_idle_and_without_a_session(start_fleet: StartFleet) -> None:
    async with beside_one_stranger(start_fleet) as (fleet, stranger):
        await publish(fleet, "0.0", None)
        await fleet.controller.begin_weight_update("0.1")
        assert stranger.engine.paused and stranger.engine.session
        await fleet.controller.dispose()
        assert stranger.engine.alive
        assert not stranger.engine.paused and not stranger.engine.session
        assert fleet.states() == ["stopped", "stopped"]


async def test_disposal_does_not_wait_for_one_that_hangs(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "TAKE_BACK_S", 0.3)
    async with beside_one_stranger(start_fleet) as (fleet, stranger):
        await publish(fleet, "0.0", None)
        stranger.engine.suspend()
        await dispose_within(fleet, 10)


async def test_it_is_stopped_and_started_like_others_but_lives_on(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with beside_one_stranger(start_fleet, weights={"directory": tmp_path}) as (fleet, stranger):
        await publish(fleet, "0.0", tmp_path)
        await fleet.controller.stop_cell("external-0")
        assert fleet.states() == ["serving", "stopped"]
        assert stranger.engine.alive
        assert fleet.router.workers == [fleet.engines[0].url]
        await publish(fleet, "0.1", tmp_path)
        assert stranger.engine.version == "0.0"
        await fleet.controller.start_cell("external-0")
        await eventually(lambda: serves(fleet, 1, "0.1"))


async def test_one_that_is_not_there_is_named_with_its_url(start_fleet: StartFleet) -> None:
    layout = replace(cpu_layout(0), external=(ExternalEngine("external-0", "http://127.0.0.1:9", "broadcast"),))
    async with start_fleet(0, layout=layout, engine={"start_timeout_s": 3.0}) as fleet:
        with pytest.raises(EngineError, match=r"is an engine running at http://127\.0\.0\.1:9\? last: .*Connect"):
            await fleet.controller.wait_ready()


async def test_one_with_data_parallel_ranks_is_refused(start_fleet: StartFleet) -> None:
    async with anyio.create_task_group() as tasks:
        engine = ScriptedEngine()
        engine.data_parallel = 2
        await Stranger(engine, tasks).start()
        layout = replace(cpu_layout(0), external=(ExternalEngine("external-0", engine.url, "broadcast"),))
        async with start_fleet(0, layout=layout) as fleet:
            with pytest.raises(EngineError, match=r"data parallel size 2 .* tensor-parallel ranks only"):
                await fleet.controller.wait_ready()
        engine.kill()
