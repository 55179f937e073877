"""The weight transaction with every step broken in every way.

The real controller, the real publication and transports, a real trainer thread and a real gloo group; the two engines
are scripted. Whatever happens, and wherever: no live engine stays paused or with an open session, none that serves
holds anything but the published weights (asked of the engine, not of the controller's book), the engine that was not
hit serves the new ones, and the next publication succeeds; all within a bound.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from asyncrl.errors import WeightUpdateError
from asyncrl.weights.transports.process_group import TransferGroup
from tests.inference.conftest import StartFleet
from tests.inference.transaction_rig import (
    BOUND_S,
    ENGINE_FAULTS,
    TRANSFER_S,
    cancel_at,
    check_after,
    fail_one_engine,
    rig,
    set_deadlines,
    shorten_deadlines,
)
from tests.scripted import Fault, die, hang, instead, refuse

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def deadlines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    set_deadlines(request, monkeypatch)


# what goes wrong, and where

STEPS: dict[str, tuple[str, int]] = {
    "pause": ("pause_generation", 1),
    "torn stamp": ("update_weight_version", 1),
    "begin session": ("begin_weight_update", 1),
    "join group": ("init_weights_update_group", 1),
    "first bucket": ("update_weights_from_distributed", 1),
    "middle bucket": ("update_weights_from_distributed", 2),
    "last bucket": ("update_weights_from_distributed", 3),
    "end session": ("end_weight_update", 1),
    "checksum": ("weights_checker", 1),
    "stamp": ("update_weight_version", 2),
    "continue": ("continue_generation", 1),
}
"""Step → the engine's endpoint, and which call of it in a publication after the first."""

FIRST_STEPS: dict[str, tuple[str, int]] = {
    "reset of the tensors": ("weights_checker", 1),
    "baseline": ("weights_checker", 2),
    "join group": STEPS["join group"],
    "middle bucket": STEPS["middle bucket"],
    "checksum": ("weights_checker", 3),
    "stamp": STEPS["stamp"],
    "continue": STEPS["continue"],
}
"""The same for the first publication: what only it does, and one step of each other kind."""


@pytest.mark.parametrize("what", ENGINE_FAULTS)
@pytest.mark.parametrize("step", STEPS)
async def test_an_engine_fails(start_fleet: StartFleet, step: str, what: str) -> None:
    endpoint, nth = STEPS[step]
    async with rig(start_fleet) as r:
        await r.publish("0.0")
        if step == "join group":
            await r.transport.aclose()  # else the group is kept
        await fail_one_engine(r, "0.1", ENGINE_FAULTS[what](endpoint, nth=nth))


@pytest.mark.parametrize("what", ["dies", "hangs", "answers 500"])
@pytest.mark.parametrize("step", FIRST_STEPS)
async def test_an_engine_fails_in_the_first_publication(start_fleet: StartFleet, step: str, what: str) -> None:
    endpoint, nth = FIRST_STEPS[step]
    async with rig(start_fleet) as r:
        await fail_one_engine(r, "0.0", ENGINE_FAULTS[what](endpoint, nth=nth))


@pytest.mark.parametrize("step", ["begin session", "last bucket", "end session", "continue"])
async def test_an_engine_dies_having_done_the_step(start_fleet: StartFleet, step: str) -> None:
    """It cannot answer for what it did."""
    endpoint, nth = STEPS[step]
    async with rig(start_fleet) as r:
        await r.publish("0.0")
        await fail_one_engine(r, "0.1", die(endpoint, nth=nth, when="after"))


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
async def test_an_engine_is_stopped_as_by_sigstop(
    start_fleet: StartFleet, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does what it was asked, answers nothing more, and its kernel goes on accepting connections."""
    shorten_deadlines(monkeypatch)
    endpoint, nth = STEPS[step]
    async with rig(start_fleet) as r:
        await r.publish("0.0")
        if step == "join group":
            await r.transport.aclose()

        async def stop() -> None:
            r.fleet.engines[1].suspend()

        await fail_one_engine(r, "0.1", instead(endpoint, stop, nth=nth))


@pytest.mark.parametrize("step", STEPS)
async def test_the_publication_is_cancelled(start_fleet: StartFleet, step: str) -> None:
    async with rig(start_fleet) as r:
        await r.publish("0.0")
        if step == "join group":
            await r.transport.aclose()
        await cancel_at(r, "0.1", *STEPS[step])


@pytest.mark.parametrize("step", ["baseline", "middle bucket", "checksum"])
async def test_the_first_publication_is_cancelled(start_fleet: StartFleet, step: str) -> None:
    async with rig(start_fleet) as r:
        await cancel_at(r, "0.0", *FIRST_STEPS[step])


async def test_a_disk_that_cannot_be_written_leaves_the_old_version_serving(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with rig(start_fleet, disk=tmp_path / "weights") as r:
        await r.publish("0.0")
        shutil.rmtree(tmp_path / "weights")
        (tmp_path / "weights").write_text("a file where the directory belongs")
        with anyio.fail_after(BOUND_S), pytest.raises(WeightUpdateError, match="weights"):
            await r.publish("0.1")
        assert r.serves(0, "0.0") and r.serves(1, "0.0")
        (tmp_path / "weights").unlink()
        await check_after(r, "0.1 again")


async def test_a_trainer_that_never_joins_the_group_costs_a_bounded_time_and_no_engine(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_deadlines(monkeypatch)
    async with rig(start_fleet) as r:
        await r.publish("0.0")
        await r.transport.aclose()
        with monkeypatch.context() as patched:
            # Engines have connected by then; the thread wakes only after everyone's deadline.
            patched.setattr(TransferGroup, "form", lambda group: time.sleep(3 * TRANSFER_S))
            with anyio.fail_after(BOUND_S), pytest.raises((WeightUpdateError, TimeoutError)):
                await r.publish("0.1")
        await check_after(r, "0.2")
        assert r.serves(0, "0.2") and r.serves(1, "0.2")


ROUTER_FAULTS: dict[str, Callable[[], Fault]] = {
    "hangs": lambda: hang("add_worker"),
    "answers 400": lambda: refuse("add_worker", 400),
    "answers 500": lambda: refuse("add_worker", 500),
}


@pytest.mark.parametrize("what", ROUTER_FAULTS)
async def test_the_router_does_not_take_one_engine(start_fleet: StartFleet, what: str) -> None:
    async with rig(start_fleet) as r:
        r.fleet.router.faults.add(ROUTER_FAULTS[what]())
        with anyio.fail_after(BOUND_S):
            await r.publish("0.0")
        assert r.serves(0, "0.0") or r.serves(1, "0.0")
        await check_after(r, "0.1")


async def test_an_engine_dies_as_it_is_registered(start_fleet: StartFleet) -> None:
    async with rig(start_fleet) as r:

        async def kill() -> None:
            r.fleet.engines[1].kill()

        r.fleet.router.faults.add(instead("add_worker", kill))
        with anyio.fail_after(BOUND_S):
            await r.publish("0.0")
        assert r.serves(0, "0.0")
        await check_after(r, "0.1")


async def test_the_first_publication_is_cancelled_as_engines_are_registered(start_fleet: StartFleet) -> None:
    async with rig(start_fleet) as r:
        await cancel_at(r, "0.0", "add_worker", server=r.fleet.router)
