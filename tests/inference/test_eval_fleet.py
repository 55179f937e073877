"""Engines that only evaluate: started on demand, pinned to a checkpoint, never in anybody's way."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from safetensors.torch import save_file

from asyncrl.errors import EngineError
from tests.inference.conftest import Fleet, StartFleet, cancelled_in, cpu_layout, eventually
from tests.inference.engines.test_recovery import FAST, publish, serves
from tests.inference.test_models import beside
from tests.inference.updates.test_weight_updates import tensors_of
from tests.scripted import ScriptedEngine, ScriptedRouter, instead, refuse

pytestmark = pytest.mark.anyio


@dataclass
class Evaluated:
    """A fleet with two engines that only evaluate."""

    fleet: Fleet
    engines: list[ScriptedEngine]
    router: ScriptedRouter
    checkpoints: Path

    def checkpoint(self, version: str) -> Path:
        directory = self.checkpoints / version
        directory.mkdir(exist_ok=True)
        save_file(tensors_of(self.fleet, version), directory / "model.safetensors")
        return directory

    def states(self) -> list[str]:
        return [s.state.value for s in self.fleet.controller.fleet().engines if s.model == "eval"]

    def serve(self, version: str) -> bool:
        """All of them, by their own word and the router's."""
        known = sorted(self.router.workers) == sorted(engine.url for engine in self.engines)
        return known and all(engine.alive and engine.version == version for engine in self.engines)


@asynccontextmanager
async def with_eval_fleet(start_fleet: StartFleet, tmp_path: Path, **settings: Any) -> AsyncIterator[Evaluated]:
    engines, router = [ScriptedEngine() for _ in range(2)], ScriptedRouter()

    def prepare(fleet: Fleet) -> None:
        fleet.host.servers |= {f"eval-{i}": engine for i, engine in enumerate(engines)} | {"router-eval": router}

    layout = replace(cpu_layout(1), beside={"eval": beside("eval", 2)})
    settings = {"restarts": 3, "eval": {"fleet": {"num_engines": 2}}} | settings
    async with start_fleet(1, layout=layout, prepare=prepare, **settings) as fleet:
        yield Evaluated(fleet, engines, router, tmp_path)
    assert fleet.failures == []


async def test_it_starts_on_demand_and_serves_nothing_before_it_is_pinned(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with with_eval_fleet(start_fleet, tmp_path) as evaluated:
        await evaluated.fleet.controller.wait_ready()
        assert evaluated.states() == []
        assert evaluated.fleet.host.spawned == ["router", "engine-0"]
        seen: list[tuple[list[str], list[str]]] = []

        async def look() -> None:
            seen.append((evaluated.states(), list(evaluated.router.workers)))

        evaluated.engines[0].script(instead("update_weights_from_disk", look))
        for version in ("0.3", "0.4"):
            await evaluated.fleet.controller.pin_eval_fleet(evaluated.checkpoint(version), version)
        assert seen == [(["updating", "updating"], [])]
        assert [engine.lives for engine in evaluated.engines] == [1, 1]


async def test_a_pin_brings_every_engine_to_the_checkpoint_and_says_where_it_is(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with with_eval_fleet(start_fleet, tmp_path) as evaluated:
        controller = evaluated.fleet.controller
        for version in ("0.3", "0.7"):
            info = await controller.pin_eval_fleet(evaluated.checkpoint(version), version)
            assert (info.version, info.router_url) == (version, evaluated.router.url)
            assert info.engine_urls == tuple(engine.url for engine in evaluated.engines)
            assert evaluated.serve(version)
            assert all(engine.weights.tensors["layer"][0, 0] for engine in evaluated.engines)
        assert evaluated.engines[0].weights.digest == evaluated.engines[1].weights.digest
        assert evaluated.router.url != controller.router_url
        assert evaluated.fleet.kinds().count("eval_fleet_pinned") == 2


async def test_it_is_pinned_to_the_published_weights_unless_told_otherwise_and_holds_no_publication(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with with_eval_fleet(start_fleet, tmp_path) as evaluated:
        fleet = evaluated.fleet
        with pytest.raises(EngineError, match=r"no copy of published weights .*weights\.keep_published to always"):
            await fleet.controller.pin_eval_fleet()
        await publish(fleet, "0.0", tmp_path)
        info = await fleet.controller.pin_eval_fleet()
        assert info.version == "0.0"
        await publish(fleet, "0.1", tmp_path)
        assert evaluated.serve("0.0")
        assert serves(fleet, 0, "0.1")
        lease = await fleet.controller.begin_weight_update("0.2")
        assert [engine.engine_id for engine in lease.engines] == ["engine-0"]
        await fleet.controller.pin_eval_fleet()  # while a publication is open
        assert evaluated.serve("0.1")
        await fleet.controller.abort_weight_update(lease.lease_id, {}, untouched=True)


async def test_a_checkpoint_without_a_version_is_known_by_the_name_of_its_directory(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with with_eval_fleet(start_fleet, tmp_path) as evaluated:
        info = await evaluated.fleet.controller.pin_eval_fleet(evaluated.checkpoint("torn:mine@home"))
        assert info.version == "torn_mine_home" and evaluated.serve(info.version)


async def test_where_a_function_evaluates_the_published_copy_is_kept_for_it_and_no_engine_starts(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(1, eval={"function": "mine:evaluate"}) as fleet:
        await publish(fleet, "0.0", tmp_path)
        info = await fleet.controller.pin_eval_fleet()
        assert (info.version, info.engine_urls, info.router_url) == ("0.0", (), "")
        await publish(fleet, "0.1", tmp_path)
        assert info.directory in fleet.controller.copies_in_use() and fleet.host.spawned == ["router", "engine-0"]
        await fleet.controller.pin_eval_fleet()
        assert info.directory not in fleet.controller.copies_in_use()


async def test_a_checkpoint_that_cannot_be_loaded_is_refused_and_none_serves(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with with_eval_fleet(start_fleet, tmp_path) as evaluated:
        controller = evaluated.fleet.controller
        await controller.pin_eval_fleet(evaluated.checkpoint("0.3"), "0.3")
        with pytest.raises(EngineError, match=r"weights 0\.4 cannot be evaluated: eval-\d: .*Cannot find any model"):
            await controller.pin_eval_fleet(tmp_path / "absent", "0.4")
        assert evaluated.router.workers == []
        assert evaluated.states() == ["pending_weights", "pending_weights"]  # it is not their fault
        await publish(evaluated.fleet, "0.0", None)  # the job goes on
        await controller.pin_eval_fleet(evaluated.checkpoint("0.5"), "0.5")
        assert evaluated.serve("0.5")


async def test_loading_is_tried_twice(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with with_eval_fleet(start_fleet, tmp_path) as evaluated:
        evaluated.engines[1].script(refuse("update_weights_from_disk", 500))
        await evaluated.fleet.controller.pin_eval_fleet(evaluated.checkpoint("0.3"), "0.3")
        assert evaluated.serve("0.3")
        assert [engine.lives for engine in evaluated.engines] == [1, 1]


async def test_an_engine_that_says_it_holds_something_else_is_not_believed(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with with_eval_fleet(start_fleet, tmp_path) as evaluated:
        liar = evaluated.engines[1]

        async def forget() -> None:
            liar.generation.stamp("other")

        liar.script(instead("model_info", forget, times=None))
        with pytest.raises(EngineError, match=r"eval-1: eval-1 holds weights 'other' of .* told to load '0\.3'"):
            await evaluated.fleet.controller.pin_eval_fleet(evaluated.checkpoint("0.3"), "0.3")
        assert evaluated.router.workers == []


async def test_an_engine_that_is_started_again_loads_the_pinned_checkpoint_before_it_serves(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with with_eval_fleet(start_fleet, tmp_path, **FAST) as evaluated:
        await evaluated.fleet.controller.pin_eval_fleet(evaluated.checkpoint("0.3"), "0.3")
        seen: list[list[str]] = []

        async def look() -> None:
            seen.append(list(evaluated.router.workers))

        evaluated.engines[0].script(instead("update_weights_from_disk", look))
        await evaluated.fleet.host.signal("eval-0", signal.SIGKILL)
        await eventually(lambda: evaluated.engines[0].lives == 2 and evaluated.serve("0.3"))
        assert seen == [[evaluated.engines[1].url]]
        assert evaluated.engines[0].weights.digest == evaluated.engines[1].weights.digest


async def test_a_pin_waits_for_an_engine_that_is_being_started_again(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with with_eval_fleet(start_fleet, tmp_path) as evaluated:
        await evaluated.fleet.controller.pin_eval_fleet(evaluated.checkpoint("0.2"), "0.2")
        await evaluated.fleet.host.kill("eval-0")
        with anyio.fail_after(5):
            info = await evaluated.fleet.controller.pin_eval_fleet(evaluated.checkpoint("0.3"), "0.3")
        assert len(info.engine_urls) == 2
        assert evaluated.serve("0.3")


async def test_an_eval_fleet_that_cannot_start_is_told_to_who_asked_and_the_job_goes_on(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with with_eval_fleet(start_fleet, tmp_path) as evaluated:
        evaluated.engines[0].exit_code = 1
        for _ in range(2):
            with pytest.raises(EngineError, match=r"eval-0 .* exited with code 1"):
                await evaluated.fleet.controller.pin_eval_fleet(evaluated.checkpoint("0.3"), "0.3")
        await publish(evaluated.fleet, "0.0", None)
        assert serves(evaluated.fleet, 0, "0.0")


async def test_without_a_section_there_is_none(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with start_fleet(1) as fleet:
        await publish(fleet, "0.0", tmp_path)
        with pytest.raises(EngineError, match=r"add a section \[eval\.fleet\]"):
            await fleet.controller.pin_eval_fleet()


async def test_a_pin_that_is_cancelled_leaves_none_that_serves(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with with_eval_fleet(start_fleet, tmp_path) as evaluated:
        checkpoint = evaluated.checkpoint("0.3")
        with anyio.CancelScope() as scope:
            evaluated.engines[1].script(cancelled_in(scope, "update_weights_from_disk"))
            await evaluated.fleet.controller.pin_eval_fleet(checkpoint, "0.3")
        assert scope.cancelled_caught
        assert evaluated.states() == ["pending_weights", "pending_weights"]
        assert evaluated.router.workers == []
        await evaluated.fleet.controller.pin_eval_fleet(evaluated.checkpoint("0.4"), "0.4")
        assert evaluated.serve("0.4")


async def test_an_eval_fleet_that_starts_while_nobody_is_to_be_probed_is_not_probed(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with with_eval_fleet(start_fleet, tmp_path, **FAST) as evaluated:
        controller = evaluated.fleet.controller
        await controller.health_monitoring_pause()
        await controller.pin_eval_fleet(evaluated.checkpoint("0.3"), "0.3")
        await anyio.sleep(0.3)
        assert not any("health_generate" in engine.calls for engine in evaluated.engines)
        await controller.health_monitoring_resume()
        await eventually(lambda: all("health_generate" in engine.calls for engine in evaluated.engines))
