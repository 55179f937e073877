"""Weight updates over scripted engines: every step broken in every way leaves nothing paused and nothing torn."""

from __future__ import annotations

import zlib

import anyio
import pytest
import torch
from torch import Tensor

from asyncrl.data.fleet import UpdateAck, UpdateLease
from asyncrl.errors import EngineError, WeightUpdateError
from asyncrl.inference.routing.routing import Routing
from tests.inference.conftest import Fleet, StartFleet, cancelled_in, eventually
from tests.scripted import hang, refuse

pytestmark = pytest.mark.anyio


def tensors_of(fleet: Fleet, version: str) -> dict[str, Tensor]:
    """Weights that no other version has."""
    value = float(zlib.crc32(version.encode()))
    return {name: torch.full_like(tensor, value) for name, tensor in fleet.engines[0].base.items()}


def deliver(fleet: Fleet, version: str, tensors: dict[str, Tensor] | None = None) -> None:
    """What a transport does, without one."""
    for engine in fleet.engines:
        engine.weights.load((tensors or tensors_of(fleet, version)).items())


def acks(lease: UpdateLease, *without: str) -> list[UpdateAck]:
    return [UpdateAck(e.engine_id, e.generation) for e in lease.engines if e.engine_id not in without]


async def publish(fleet: Fleet, version: str) -> None:
    await fleet.controller.wait_ready()
    lease = await fleet.controller.begin_weight_update(version)
    deliver(fleet, version)
    await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))


def assert_nothing_paused_or_torn(fleet: Fleet) -> None:
    """Of the engines whose process lives: none paused, no session open, none routed with torn weights."""
    for status, engine in zip(fleet.controller.fleet().engines, fleet.engines, strict=True):
        if status.state in ("quarantined", "dead"):
            assert status.endpoint.url not in fleet.router.workers
            continue
        assert not engine.paused
        assert not engine.session
        if status.endpoint.url in fleet.router.workers:
            assert engine.version == fleet.controller.fleet().published_version


async def test_an_update_pauses_stamps_torn_and_serves_the_new_version(start_fleet: StartFleet) -> None:
    async with start_fleet(2) as fleet:
        await fleet.controller.wait_ready()
        engine = fleet.engines[0]
        engine.calls.clear()
        lease = await fleet.controller.begin_weight_update("0.0")
        assert engine.paused and engine.session and engine.version == "torn:0.0"
        assert engine.calls[:3] == ["pause_generation", "update_weight_version", "begin_weight_update"]
        assert fleet.states() == ["updating", "updating"]
        deliver(fleet, "0.0")
        engine.calls.clear()
        await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))
        assert engine.calls[:4] == [
            "end_weight_update",
            "weights_checker",
            "update_weight_version",
            "continue_generation",
        ]
        assert fleet.states() == ["serving", "serving"]
        assert len(fleet.router.workers) == 2
        assert fleet.controller.fleet().published_version == "0.0"
        assert_nothing_paused_or_torn(fleet)


@pytest.mark.parametrize(("on_update", "mode"), [("retract", "retract"), ("wait", "retract"), ("abort", "abort")])
async def test_running_requests_are_paused_as_configured(start_fleet: StartFleet, on_update: str, mode: str) -> None:
    async with start_fleet(1, weights={"on_update": on_update}) as fleet:
        await publish(fleet, "0.0")
        lease = await fleet.controller.begin_weight_update("0.1")
        assert fleet.engines[0].generation.paused == mode
        await fleet.controller.abort_weight_update(lease.lease_id, {}, untouched=True)
        assert_nothing_paused_or_torn(fleet)


async def test_the_first_rollout_is_preceded_by_an_answer_through_the_router(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = Routing.probe
    monkeypatch.setattr(Routing, "probe", lambda routing, version: patient(routing, version, 0.2))
    async with start_fleet(1) as fleet:
        await fleet.controller.wait_ready()
        fault = refuse("generate", 503, times=None)
        fleet.router.faults.add(fault)
        await publish(fleet, "0.0")
        with pytest.raises(EngineError, match="router: no generation: HTTP 503"):
            await fleet.controller.prepare_rollout(0)
        fleet.router.faults.clear()
        for rollout_id in (0, 1):
            await fleet.controller.prepare_rollout(rollout_id)
        assert fleet.router.calls.count("generate") == 1 + fleet.router.faults.happened.count(fault)


async def test_tensors_that_an_engine_silently_ignored_are_named_on_the_first_publication(
    start_fleet: StartFleet,
) -> None:
    async with start_fleet(1) as fleet:
        await fleet.controller.wait_ready()
        lease = await fleet.controller.begin_weight_update("0.0")
        # The values are those that the engine had loaded from disk itself: only the reset tells them apart.
        base = fleet.engines[0].base
        deliver(fleet, "0.0", {"embed": base["embed"], "model.layer": base["layer"]})
        with pytest.raises(WeightUpdateError, match="engine-0: took the update but ignored layer"):
            await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))
        assert fleet.states() == ["pending_weights"]
        assert fleet.router.workers == []
        assert_nothing_paused_or_torn(fleet)
        await publish(fleet, "0.0")
        assert fleet.states() == ["serving"]


async def test_an_engine_with_other_values_than_the_majority_is_taken_out(start_fleet: StartFleet) -> None:
    async with start_fleet(3) as fleet:
        await fleet.controller.wait_ready()
        lease = await fleet.controller.begin_weight_update("0.0")
        deliver(fleet, "0.0")
        fleet.engines[1].weights.load([("embed", torch.zeros(8))])
        await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))
        assert fleet.states() == ["serving", "quarantined", "serving"]
        assert_nothing_paused_or_torn(fleet)


@pytest.mark.parametrize(("verify", "checks"), [("first", 3), ("always", 4), ("never", 0)])
async def test_verification_is_as_frequent_as_configured(start_fleet: StartFleet, verify: str, checks: int) -> None:
    async with start_fleet(1, weights={"verify": verify}) as fleet:
        await publish(fleet, "0.0")
        await publish(fleet, "0.1")
        assert fleet.engines[0].calls.count("weights_checker") == checks


async def test_an_engine_without_an_ack_is_quarantined_and_the_others_go_on(start_fleet: StartFleet) -> None:
    async with start_fleet(2) as fleet:
        await publish(fleet, "0.0")
        lease = await fleet.controller.begin_weight_update("0.1")
        deliver(fleet, "0.1")
        await fleet.controller.commit_weight_update(lease.lease_id, acks(lease, "engine-1"))
        assert fleet.states() == ["serving", "quarantined"]
        assert len(fleet.router.workers) == 1
        assert_nothing_paused_or_torn(fleet)
        await publish(fleet, "0.2")


async def test_a_second_update_is_refused_while_one_is_open_and_pauses_nothing_twice(start_fleet: StartFleet) -> None:
    async with start_fleet(1) as fleet:
        await fleet.controller.wait_ready()
        lease = await fleet.controller.begin_weight_update("0.0")
        with pytest.raises(WeightUpdateError, match=f"{lease.lease_id} of version 0.0 is open"):
            await fleet.controller.begin_weight_update("0.1")
        deliver(fleet, "0.0")
        await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))


async def test_after_an_abort_an_engine_is_out_of_the_router_until_the_next_publication(
    start_fleet: StartFleet,
) -> None:
    async with start_fleet(2) as fleet:
        await publish(fleet, "0.0")
        lease = await fleet.controller.begin_weight_update("0.1")
        await fleet.controller.abort_weight_update(lease.lease_id, {"engine-1": "hung in the broadcast"})
        assert fleet.states() == ["pending_weights", "quarantined"]
        assert fleet.router.workers == []
        assert_nothing_paused_or_torn(fleet)
        assert "abort_request" in fleet.engines[0].calls
        await fleet.controller.abort_weight_update(lease.lease_id, {})
        with pytest.raises(WeightUpdateError, match="was given up"):
            await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))
        await publish(fleet, "0.2")
        assert len(fleet.router.workers) == 1


async def test_an_abort_before_any_tensor_was_sent_keeps_the_old_version_serving(start_fleet: StartFleet) -> None:
    async with start_fleet(1) as fleet:
        await publish(fleet, "0.0")
        lease = await fleet.controller.begin_weight_update("0.1")
        await fleet.controller.abort_weight_update(lease.lease_id, {}, untouched=True)
        assert fleet.states() == ["serving"]
        assert fleet.engines[0].version == "0.0"
        assert "abort_request" not in fleet.engines[0].calls
        assert_nothing_paused_or_torn(fleet)


async def test_a_lease_that_passes_its_deadline_is_taken_back(start_fleet: StartFleet) -> None:
    async with start_fleet(1, weights={"lease_timeout_s": 0.2}) as fleet:
        await publish(fleet, "0.0")
        lease = await fleet.controller.begin_weight_update("0.1")
        await eventually(lambda: fleet.controller.statistics().open_lease is None and not fleet.engines[0].paused)
        with pytest.raises(WeightUpdateError, match=r"was given up \(it passed its deadline of 0\.2 s\)"):
            await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))
        assert_nothing_paused_or_torn(fleet)
        assert fleet.kinds()[-1] == "weight_update_aborted"


BEGIN_STEPS = ("pause_generation", "update_weight_version", "begin_weight_update")
COMMIT_STEPS = ("end_weight_update", "update_weight_version", "continue_generation")


@pytest.mark.parametrize("step", BEGIN_STEPS)
@pytest.mark.parametrize("status", [400, 500])
async def test_an_engine_that_refuses_to_begin_is_taken_out_and_the_other_updates(
    start_fleet: StartFleet, step: str, status: int
) -> None:
    async with start_fleet(2) as fleet:
        await publish(fleet, "0.0")
        fleet.engines[0].script(refuse(step, status, times=None))
        await publish(fleet, "0.1")
        assert fleet.states() == ["quarantined", "serving"]
        assert_nothing_paused_or_torn(fleet)


@pytest.mark.parametrize("step", COMMIT_STEPS)
@pytest.mark.parametrize("status", [400, 500])
async def test_an_engine_that_refuses_to_commit_is_taken_out_and_the_other_serves(
    start_fleet: StartFleet, step: str, status: int
) -> None:
    async with start_fleet(2) as fleet:
        await publish(fleet, "0.0")
        lease = await fleet.controller.begin_weight_update("0.1")
        deliver(fleet, "0.1")
        fleet.engines[0].script(refuse(step, status, times=None))
        await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))
        assert fleet.states() == ["quarantined", "serving"]
        assert_nothing_paused_or_torn(fleet)


@pytest.mark.parametrize("step", BEGIN_STEPS)
async def test_a_begin_that_is_cancelled_pauses_nothing(start_fleet: StartFleet, step: str) -> None:
    async with start_fleet(2) as fleet:
        await publish(fleet, "0.0")
        with anyio.CancelScope() as scope:
            fault = cancelled_in(scope, step, callers=2)
            for engine in fleet.engines:
                engine.script(fault)
            await fleet.controller.begin_weight_update("0.1")
        assert scope.cancelled_caught
        assert fleet.states() == ["serving", "serving"]
        assert {engine.version for engine in fleet.engines} == {"0.0"}
        assert_nothing_paused_or_torn(fleet)
        await publish(fleet, "0.1")


@pytest.mark.parametrize("step", COMMIT_STEPS)
async def test_a_commit_that_is_cancelled_pauses_nothing_and_serves_nothing_torn(
    start_fleet: StartFleet, step: str
) -> None:
    async with start_fleet(2) as fleet:
        await publish(fleet, "0.0")
        lease = await fleet.controller.begin_weight_update("0.1")
        deliver(fleet, "0.1")
        with anyio.CancelScope() as scope:
            fleet.engines[0].script(cancelled_in(scope, step))
            await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))
        assert scope.cancelled_caught
        assert_nothing_paused_or_torn(fleet)
        assert fleet.states() == ["pending_weights", "pending_weights"]
        await publish(fleet, "0.2")
        assert len(fleet.router.workers) == 2


async def test_an_engine_that_hangs_in_the_clean_up_is_killed_in_bounded_time(start_fleet: StartFleet) -> None:
    async with start_fleet(2) as fleet:
        await publish(fleet, "0.0")
        lease = await fleet.controller.begin_weight_update("0.1")
        fleet.engines[0].script(hang("continue_generation", times=None))
        with anyio.fail_after(8):
            await fleet.controller.abort_weight_update(lease.lease_id, {})
        assert fleet.states() == ["quarantined", "pending_weights"]
        assert_nothing_paused_or_torn(fleet)


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_an_engine_that_dies_around_an_update_is_left_out(start_fleet: StartFleet, when: str) -> None:
    async with start_fleet(2) as fleet:
        await publish(fleet, "0.0")
        if when == "before":
            await fleet.host.kill("engine-0")
        lease = await fleet.controller.begin_weight_update("0.1")
        if when == "during":
            await fleet.host.kill("engine-0")
        deliver(fleet, "0.1")
        await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))
        if when == "after":
            await fleet.host.kill("engine-0")
        await eventually(lambda: len(fleet.router.workers) == 1)
        assert fleet.states() == ["dead", "serving"]
        assert_nothing_paused_or_torn(fleet)
        await publish(fleet, "0.2")
