"""How long a fleet stands still for an engine that hangs: a job's own deadlines, on a clock that runs ahead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.inference.routing.router_client import WORKER_TIMEOUT_S
from asyncrl.inference.updates import deadlines as bounds
from asyncrl.inference.updates.deadlines import Deadlines
from tests.inference.conftest import Fleet, StartFleet, eventually
from tests.inference.engines.test_recovery import publish, serves
from tests.inference.fast_clock import FAST_BACKEND
from tests.inference.updates.test_weight_updates import acks, assert_nothing_paused_or_torn, deliver
from tests.scripted import freeze, hang, instead

pytestmark = pytest.mark.anyio

GB = 10**9
SLACK_S = 40.0
"""For what really takes time, which seems longer by the clock: 5 s on a machine that does much else."""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return FAST_BACKEND


STEPS = {
    "pause": ("pause_generation", 1, bounds.PAUSE_S),
    "torn stamp": ("update_weight_version", 1, bounds.STEP_S),
    "end session": ("end_weight_update", 1, bounds.STEP_S),
    "checksum": ("weights_checker", 1, bounds.STEP_S),
    "continue": ("continue_generation", 1, bounds.STEP_S),
}
"""Step → its endpoint, which call of it in a publication after the first, and its bound for a model of no size."""


@pytest.mark.parametrize("step", STEPS)
async def test_an_engine_that_hangs_holds_the_others_up_for_the_bound_of_one_step(
    start_fleet: StartFleet, step: str
) -> None:
    endpoint, nth, bound_s = STEPS[step]
    async with start_fleet(2, weights={"verify": "always"}) as fleet:
        await publish(fleet, "0.0", None)
        went_on: list[float] = []

        async def note() -> None:
            went_on.append(anyio.current_time())

        fleet.engines[0].script(instead("continue_generation", note))
        fleet.engines[1].script(freeze(endpoint, nth=nth))
        began = anyio.current_time()
        await publish(fleet, "0.1", None)
        assert fleet.engines[1].faults.happened
        assert went_on[0] - began < bound_s + SLACK_S
        assert serves(fleet, 0, "0.1")
        assert fleet.states() == ["serving", "quarantined"]


async def test_the_first_publication_is_bounded_too(start_fleet: StartFleet) -> None:
    async with start_fleet(2) as fleet:
        await fleet.controller.wait_ready()
        fleet.engines[1].script(freeze("weights_checker"))
        began = anyio.current_time()
        await publish(fleet, "0.0", None)
        assert anyio.current_time() - began < bounds.STEP_S + SLACK_S
        assert serves(fleet, 0, "0.0")


def sized(tmp_path: Path, size_bytes: int) -> Any:
    """A model of that size, as the file system says."""

    def prepare(fleet: Fleet) -> None:
        os.truncate(tmp_path / "model.safetensors", size_bytes)

    return prepare


async def test_a_large_engine_is_given_the_time_that_its_weights_take(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with start_fleet(2, prepare=sized(tmp_path, 2 * GB)) as fleet:
        await publish(fleet, "0.0", None)
        lease = await fleet.controller.begin_weight_update("0.1")
        fleet.engines[0].script(hang("end_weight_update", seconds=12.0))
        await fleet.controller.abort_weight_update(lease.lease_id, {})
        assert fleet.states() == ["pending_weights", "pending_weights"]
        lease = await fleet.controller.begin_weight_update("0.2")
        deliver(fleet, "0.2")
        fleet.engines[1].script(hang("end_weight_update", seconds=12.0))
        await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))
        assert serves(fleet, 0, "0.2") and serves(fleet, 1, "0.2")
        assert [engine.lives for engine in fleet.engines] == [1, 1]


@pytest.mark.parametrize("outcome", ["committed", "given up untouched"])
async def test_a_router_that_dies_in_a_long_transfer_costs_no_engine_and_knows_them_afterwards(
    start_fleet: StartFleet, outcome: str
) -> None:
    """Engines that wait for tensors cannot answer a router that looks them up."""
    async with start_fleet(2, restarts=3) as fleet:
        await publish(fleet, "0.0", None)
        lease = await fleet.controller.begin_weight_update("0.1")
        for engine in fleet.engines:
            engine.suspend()
        await fleet.host.kill("router")
        await eventually(lambda: fleet.router.lives == 2, 120)
        await anyio.sleep(70.0 if outcome == "committed" else 15.0)  # longer than a router is given to take an engine
        assert fleet.states() == ["updating", "updating"]
        for engine in fleet.engines:
            engine.go_on()
        if outcome == "committed":
            deliver(fleet, "0.1")
            await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))
        else:
            await fleet.controller.abort_weight_update(lease.lease_id, {}, untouched=True)
        version = "0.1" if outcome == "committed" else "0.0"
        await eventually(lambda: serves(fleet, 0, version) and serves(fleet, 1, version), 240)
        assert [engine.lives for engine in fleet.engines] == [1, 1]
        assert_nothing_paused_or_torn(fleet)
    assert fleet.failures == []


async def test_an_engine_that_serves_and_that_a_new_router_does_not_take_is_started_again(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(2, restarts=3) as fleet:
        await publish(fleet, "0.0", None)
        await fleet.controller.health_monitoring_pause()
        fleet.engines[1].suspend()
        await fleet.host.kill("router")
        await eventually(lambda: fleet.states()[1] in ("quarantined", "starting", "pending_weights"), 240)
        await eventually(lambda: fleet.engines[1].lives == 2, 120)
        assert fleet.router.workers == [fleet.engines[0].url]


async def test_an_engine_that_dies_five_times_serves_again_each_time(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with start_fleet(1, restarts=5) as fleet:
        await publish(fleet, "0.0", tmp_path)
        url = fleet.engines[0].url
        for life in range(2, 7):
            began = anyio.current_time()
            await fleet.host.kill("engine-0")
            await eventually(lambda life=life: fleet.engines[0].lives == life and serves(fleet, 0, "0.0"), 60)
            assert anyio.current_time() - began < (2.0 ** (life - 3) if life > 2 else 0.0) + SLACK_S
            assert fleet.engines[0].url == url


@pytest.mark.parametrize(
    ("size_bytes", "ranks", "pause_s"), [(0, 1, 90.0), (GB, 1, 110.0), (16 * GB, 1, 410.0), (140 * GB, 8, 440.0)]
)
def test_the_longest_pause_beside_the_transfer_follows_from_the_size_of_the_weights(
    size_bytes: int, ranks: int, pause_s: float
) -> None:
    """Every step at its bound, in every engine: nothing that a healthy fleet comes near."""
    deadlines = Deadlines(size_bytes, ranks)
    assert deadlines.begin_s(baseline=False) + deadlines.commit_s(verify=True) == pytest.approx(pause_s)
    assert deadlines.begin_s(baseline=True) > deadlines.begin_s(baseline=False)


@pytest.mark.parametrize("size_bytes", [0, 60 * GB, 140 * GB])
async def test_a_lease_says_how_long_its_end_may_take_and_that_is_longer_than_all_steps_at_their_bound(
    start_fleet: StartFleet, tmp_path: Path, size_bytes: int
) -> None:
    async with start_fleet(1) as fleet:
        await publish(fleet, "0.0", None)
        deadlines = fleet.controller._started.actor.deadlines = Deadlines(size_bytes)
        lease = await fleet.controller.begin_weight_update("0.1")
        await fleet.controller.abort_weight_update(lease.lease_id, {}, untouched=True)
    assert lease.settle_s >= deadlines.commit_s(verify=True) + deadlines.take_back_s + 2 * WORKER_TIMEOUT_S


def test_the_size_of_a_model_is_that_of_its_weight_files(tmp_path: Path) -> None:
    assert Deadlines.of_model(tmp_path).size_bytes == bounds.UNKNOWN_BYTES
    assert Deadlines.of_model(tmp_path / "absent").size_bytes == bounds.UNKNOWN_BYTES
    for name, size in {"a-00001.safetensors": 1000, "a-00002.safetensors": 24, "tokenizer.json": 7}.items():
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "blob")
    assert Deadlines.of_model(tmp_path, 2) == Deadlines(1024, 2)
