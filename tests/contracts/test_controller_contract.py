"""What a loop and a trainer may rely on from a controller: real (over scripted engines) and fake alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import pytest

from asyncrl.data.fleet import EngineState, FleetView, UpdateAck, UpdateLease
from asyncrl.errors import EngineError, WeightUpdateError
from tests.contracts.fakes import FakeController
from tests.inference.conftest import StartFleet, anyio_backend, eventually, start_fleet
from tests.inference.test_updates import tensors_of

pytestmark = pytest.mark.anyio
__all__ = ["anyio_backend", "start_fleet"]  # fixtures

Start = Callable[[], AbstractAsyncContextManager["Subject"]]


class Subject:
    """A controller of two engines, and what a test needs besides its public methods."""

    def __init__(self, controller: Any, deliver: Callable[[str], None]) -> None:
        self.controller = controller
        self.deliver = deliver

    async def publish(self, version: str) -> None:
        lease = await self.controller.begin_weight_update(version)
        self.deliver(version)
        await self.controller.commit_weight_update(lease.lease_id, acks(lease))

    def states(self) -> list[EngineState]:
        return [status.state for status in self.controller.fleet().engines]


def acks(lease: UpdateLease, *without: str) -> list[UpdateAck]:
    return [UpdateAck(e.engine_id, e.generation) for e in lease.engines if e.engine_id not in without]


@pytest.fixture(params=["fake", "real"])
def start(request: pytest.FixtureRequest, start_fleet: StartFleet) -> Start:
    @asynccontextmanager
    async def fake() -> AsyncIterator[Subject]:
        controller = FakeController(engines=2)
        yield Subject(controller, lambda version: None)
        await controller.dispose()

    @asynccontextmanager
    async def real() -> AsyncIterator[Subject]:
        async with start_fleet(2, restarts=3) as fleet:

            def deliver(version: str) -> None:
                for engine in fleet.engines:
                    engine.weights.load(tensors_of(fleet, version).items())

            await fleet.controller.wait_ready()
            yield Subject(fleet.controller, deliver)

    return fake if request.param == "fake" else real


async def test_nothing_can_be_rolled_out_before_weights_were_published(start: Start) -> None:
    async with start() as subject:
        assert subject.states() == [EngineState.PENDING_WEIGHTS] * 2
        with pytest.raises(EngineError):
            await subject.controller.prepare_rollout(0)
        with pytest.raises(EngineError):
            await subject.controller.prepare_eval()


async def test_a_published_version_is_what_every_engine_serves(start: Start) -> None:
    async with start() as subject:
        for version in ("0.0", "0.1"):
            await subject.publish(version)
            view = subject.controller.fleet()
            assert view.published_version == version
            assert {(s.state, s.version) for s in view.engines} == {(EngineState.SERVING, version)}
            await subject.controller.prepare_rollout(0)
            await subject.controller.prepare_eval()


async def test_one_update_at_a_time_and_each_ends_once(start: Start) -> None:
    async with start() as subject:
        lease = await subject.controller.begin_weight_update("0.0")
        assert subject.states() == [EngineState.UPDATING] * 2
        assert (lease.version, len(lease.engines)) == ("0.0", 2)
        assert lease.paused_at <= lease.deadline
        with pytest.raises(WeightUpdateError, match="is open"):
            await subject.controller.begin_weight_update("0.1")
        subject.deliver("0.0")
        await subject.controller.commit_weight_update(lease.lease_id, acks(lease))
        with pytest.raises(WeightUpdateError):
            await subject.controller.commit_weight_update(lease.lease_id, acks(lease))
        await subject.controller.abort_weight_update(lease.lease_id, {})  # of an ended lease: nothing
        assert subject.controller.fleet().published_version == "0.0"
        assert subject.states() == [EngineState.SERVING] * 2


async def test_an_update_in_which_nothing_was_sent_leaves_the_old_version(start: Start) -> None:
    async with start() as subject:
        await subject.publish("0.0")
        lease = await subject.controller.begin_weight_update("0.1")
        await subject.controller.abort_weight_update(lease.lease_id, {}, untouched=True)
        view = subject.controller.fleet()
        assert view.published_version == "0.0"
        assert {(s.state, s.version) for s in view.engines} == {(EngineState.SERVING, "0.0")}


async def test_an_update_that_may_have_torn_weights_takes_its_engines_out_until_the_next(start: Start) -> None:
    async with start() as subject:
        await subject.publish("0.0")
        lease = await subject.controller.begin_weight_update("0.1")
        await subject.controller.abort_weight_update(lease.lease_id, {})
        assert {(s.state, s.version) for s in subject.controller.fleet().engines} == {
            (EngineState.PENDING_WEIGHTS, None)
        }
        await subject.publish("0.2")
        assert subject.states() == [EngineState.SERVING] * 2


async def test_an_engine_that_did_not_acknowledge_does_not_serve_and_comes_back(start: Start) -> None:
    async with start() as subject:
        lease = await subject.controller.begin_weight_update("0.0")
        subject.deliver("0.0")
        await subject.controller.commit_weight_update(lease.lease_id, acks(lease, "engine-1"))
        served = {s.endpoint.engine_id: s.version for s in subject.controller.fleet().engines}
        assert served == {"engine-0": "0.0", "engine-1": None}
        await eventually(lambda: subject.states()[1] is EngineState.PENDING_WEIGHTS)
        assert subject.controller.fleet().engines[1].endpoint.generation == 1
        await subject.publish("0.1")
        assert subject.states() == [EngineState.SERVING] * 2


async def test_an_ack_of_an_older_process_is_void(start: Start) -> None:
    async with start() as subject:
        lease = await subject.controller.begin_weight_update("0.0")
        stale = [UpdateAck(engine.engine_id, engine.generation - 1) for engine in lease.engines]
        with pytest.raises(WeightUpdateError):
            await subject.controller.commit_weight_update(lease.lease_id, stale)
        assert subject.controller.fleet().published_version is None


async def test_engines_are_stopped_and_started_while_a_job_runs_but_not_the_last(start: Start) -> None:
    async with start() as subject:
        controller = subject.controller
        await subject.publish("0.0")
        await controller.stop_cell("engine-0")
        assert subject.states() == [EngineState.STOPPED, EngineState.SERVING]
        await controller.prepare_rollout(1)
        with pytest.raises(EngineError, match="the last engine that serves"):
            await controller.stop_cell("engine-1")
        with pytest.raises(EngineError, match="engine-1 cannot be started: it is serving"):
            controller.start_cell("engine-1")
        with pytest.raises(EngineError, match="there is no engine engine-7"):
            controller.start_cell("engine-7")
        controller.start_cell("engine-0")
        await eventually(lambda: subject.states()[0] is EngineState.PENDING_WEIGHTS)
        assert controller.fleet().engines[0].endpoint.generation == 1
        await subject.publish("0.1")
        assert subject.states() == [EngineState.SERVING] * 2


async def test_what_leaves_a_controller_survives_a_journey_over_a_wire(start: Start) -> None:
    async with start() as subject:
        await subject.publish("0.0")
        view = subject.controller.fleet()
        assert msgspec.json.decode(msgspec.json.encode(view), type=FleetView) == view
        lease = await subject.controller.begin_weight_update("0.1")
        assert msgspec.json.decode(msgspec.json.encode(lease), type=UpdateLease) == lease
        await subject.controller.abort_weight_update(lease.lease_id, {}, untouched=True)


async def test_after_dispose_nothing_is_promised_and_disposing_again_is_nothing(start: Start) -> None:
    async with start() as subject:
        await subject.publish("0.0")
        await subject.controller.dispose()
        await subject.controller.dispose()
        assert subject.states() == [EngineState.STOPPED] * 2
        with pytest.raises(EngineError):
            await subject.controller.prepare_rollout(1)
        with pytest.raises(EngineError):
            await subject.controller.begin_weight_update("0.1")
