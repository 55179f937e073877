"""The router's list is made true in the end, whatever cuts a registration short."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError
from asyncrl.inference.routing.router_client import Worker
from asyncrl.inference.routing.routing import Routing
from tests.inference.conftest import StartFleet, cancelled_in, eventually
from tests.inference.engines.test_recovery import serves
from tests.inference.test_eval_fleet import with_eval_fleet
from tests.inference.updates.test_weight_updates import acks, deliver
from tests.scripted import ScriptedHost, instead, refuse

pytestmark = pytest.mark.anyio


async def test_an_engine_whose_registration_was_cancelled_is_registered_all_the_same(start_fleet: StartFleet) -> None:
    async with start_fleet(2) as fleet:
        await fleet.controller.wait_ready()
        lease = await fleet.controller.begin_weight_update("0.0")
        deliver(fleet, "0.0")
        with anyio.CancelScope() as scope:
            # the router takes nothing in from these
            fleet.router.faults.add(cancelled_in(scope, "add_worker", callers=2, times=2))
            await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))
        assert scope.cancelled_caught
        assert fleet.states() == ["serving", "serving"]  # it was committed
        await eventually(lambda: serves(fleet, 0, "0.0") and serves(fleet, 1, "0.0"))
    assert fleet.failures == []


async def test_an_engine_that_came_while_the_router_stood_still_is_told_later(start_fleet: StartFleet) -> None:
    async with start_fleet(2) as fleet:
        await fleet.controller.wait_ready()
        lease = await fleet.controller.begin_weight_update("0.0")
        deliver(fleet, "0.0")
        fleet.router.faults.add(refuse("workers", 500, times=4))  # it neither lists nor takes in: both ask twice
        await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))
        await eventually(lambda: serves(fleet, 0, "0.0") and serves(fleet, 1, "0.0"))
    assert fleet.failures == []


async def test_an_engine_that_is_added_while_its_address_is_taken_out_is_told_again() -> None:
    router = SlowRouter(["http://latecomer", "http://engine-0"])
    engine = ListedEngine()
    routing = Routing(router)  # type: ignore[arg-type]
    routing.doubt()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(routing.tend, [engine])
        with anyio.fail_after(10):
            await router.stands_still.wait()
            await routing.add(engine)  # type: ignore[arg-type]  # listed already: nothing is done
            router.goes_on.set()
            await eventually(lambda: router.removed == 2 and router.urls == ["http://engine-0"] and not routing._owed)
        tasks.cancel_scope.cancel()


class ListedEngine:
    """As much of one as its routing asks for."""

    engine_id, endpoint, state, moves = "engine-0", SimpleNamespace(url="http://engine-0"), EngineState.SERVING, 0
    routed = False

    def changed(self) -> None:
        """Nobody looks."""

    async def quarantine(self, reason: str) -> None:
        raise AssertionError(reason)


class SlowRouter:
    """Its second removal takes until `goes_on`."""

    def __init__(self, urls: list[str]) -> None:
        self.urls, self.removed = urls, 0
        self.stands_still, self.goes_on = anyio.Event(), anyio.Event()

    async def workers(self) -> tuple[Worker, ...]:
        return tuple(Worker(url, url, is_healthy=True) for url in self.urls)

    async def add(self, url: str, timeout_s: float) -> None:
        if url not in self.urls:
            self.urls.append(url)

    async def remove(self, url: str, timeout_s: float) -> None:
        if self.removed == 1:
            self.stands_still.set()
            await self.goes_on.wait()
        self.urls.remove(url)
        self.removed += 1


async def test_an_engine_that_the_router_refused_and_lists_all_the_same_is_taken_out(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with with_eval_fleet(start_fleet, tmp_path) as evaluated:
        evaluated.router.faults.add(refuse("add_worker", 500, when="after", times=None))
        with pytest.raises(EngineError, match="refused"):
            await evaluated.fleet.controller.pin_eval_fleet(evaluated.checkpoint("0.3"), "0.3")
        await eventually(lambda: evaluated.router.workers == [])
        assert evaluated.states() == ["pending_weights", "pending_weights"]


async def test_a_pin_that_is_cancelled_in_its_registration_leaves_nobody_listed(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with with_eval_fleet(start_fleet, tmp_path) as evaluated:
        checkpoint = evaluated.checkpoint("0.3")
        goes_on, taken_in = anyio.Event(), anyio.Event()

        async def take_in_late() -> None:
            scope.cancel()
            await goes_on.wait()
            evaluated.router.workers = [engine.url for engine in evaluated.engines]
            taken_in.set()

        evaluated.router.faults.add(instead("add_worker", take_in_late))
        with anyio.CancelScope() as scope:
            await evaluated.fleet.controller.pin_eval_fleet(checkpoint, "0.3")
        assert scope.cancelled_caught
        goes_on.set()
        await taken_in.wait()
        await eventually(lambda: evaluated.router.workers == [])
        assert evaluated.states() == ["pending_weights", "pending_weights"]


async def test_one_unlucky_answer_of_the_router_costs_an_evaluation_nothing(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with with_eval_fleet(start_fleet, tmp_path) as evaluated:
        evaluated.router.faults.add(refuse("generate", 503))
        await evaluated.fleet.controller.pin_eval_fleet(evaluated.checkpoint("0.3"), "0.3")
        assert evaluated.serve("0.3")
        assert [engine.calls.count("update_weights_from_disk") for engine in evaluated.engines] == [1, 1]


async def test_the_numbers_of_each_router_are_where_view_and_event_say(start_fleet: StartFleet, tmp_path: Path) -> None:
    def metrics_url(host: ScriptedHost, name: str) -> str:
        argv = host.specs[name].argv
        address, port = (argv[argv.index(flag) + 1] for flag in ("--prometheus-host", "--prometheus-port"))
        return f"http://{address}:{port}/metrics"

    async with with_eval_fleet(start_fleet, tmp_path) as evaluated:
        fleet = evaluated.fleet
        await fleet.controller.wait_ready()
        await fleet.controller.pin_eval_fleet(evaluated.checkpoint("0.3"), "0.3")
        expected = {"actor": metrics_url(fleet.host, "router"), "eval": metrics_url(fleet.host, "router-eval")}
        assert fleet.controller.fleet().metrics_urls == expected
        told: list[dict[str, Any]] = [event for event in fleet.events.recent if event["kind"] == "fleet_ready"]
        assert {event["model"]: event["metrics_url"] for event in told} == expected
        assert told[0]["router_url"] == fleet.controller.router_url
