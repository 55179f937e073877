"""The weight transaction broken at each step, whatever brings the weights: disk, tensor handover, and the trainer.

What must be so afterwards stands in `test_transaction_faults`, which breaks the broadcast in every way. The steps
before and after the transfer are the same code for each transport: `make test` breaks every step once and those of the
transfer in every way, `make test-long` all in every way.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.errors import EngineError
from tests.inference.conftest import StartFleet, eventually
from tests.inference.transaction_rig import (
    BOUND_S,
    ENGINE_FAULTS,
    cancel_at,
    check_after,
    fail_one_engine,
    fail_trainer,
    rig,
    set_deadlines,
)
from tests.scripted import refuse

pytestmark = pytest.mark.anyio

FAULTS = (*ENGINE_FAULTS, "cancelled")
BEFORE: dict[str, tuple[str, int]] = {
    "pause": ("pause_generation", 1),
    "torn stamp": ("update_weight_version", 1),
    "begin session": ("begin_weight_update", 1),
}
TRANSFER: dict[str, dict[str, tuple[str, int]]] = {
    "disk": {"load": ("update_weights_from_disk", 1)},
    "handover": {
        f"{name} bucket": ("update_weights_from_tensor", nth) for nth, name in enumerate(("first", "middle", "last"), 1)
    },
}
AFTER: dict[str, tuple[str, int]] = {
    "end session": ("end_weight_update", 1),
    "checksum": ("weights_checker", 1),
    "stamp": ("update_weight_version", 2),
    "continue": ("continue_generation", 1),
}
"""Step → the engine's endpoint, and which call of it in a publication after the first."""
FIRST = {"reset of the tensors": ("weights_checker", 1), "baseline": ("weights_checker", 2)}
"""What only the first publication does."""

EVERY_WAY = [
    (transport, step, what)
    for transport, transfer in TRANSFER.items()
    for step in (*BEFORE, *transfer, *AFTER, *FIRST)
    for what in FAULTS
]
TURNS = itertools.cycle(FAULTS)
QUICK = [
    (transport, step, what)
    for transport, transfer in TRANSFER.items()
    for step in (*BEFORE, *transfer, *AFTER, *FIRST)
    for what in (FAULTS if step in ("load", "middle bucket") else [next(TURNS)])
]

LAST_TENSOR = {"first bucket": 2, "middle bucket": 3, "last bucket": 6, "end of the export": 7}
"""Step → number of the exported tensor that completes its bucket."""
TRAINER_STEPS: dict[str, dict[str, str | int]] = {
    "broadcast": {
        "turn": "turn for the weight export",
        "store": "stores of the weight transfer groups",
        "join": "weight transfer groups",
        **LAST_TENSOR,
    },
    "disk": {"turn": "turn for the weight export", **LAST_TENSOR},
    "handover": {"turn": "turn for the weight export", **LAST_TENSOR},
}
"""What the trainer does in a publication."""


@pytest.fixture(autouse=True)
def deadlines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    set_deadlines(request, monkeypatch)


def by(transport: str, tmp_path: Path) -> dict[str, Any]:
    """Settings of the rig."""
    return {
        "broadcast": {},
        "disk": {"disk": tmp_path / "weights"},
        "handover": {"handover": True},
    }[transport]


async def break_step(start_fleet: StartFleet, tmp_path: Path, transport: str, step: str, what: str) -> None:
    endpoint, nth = (BEFORE | TRANSFER[transport] | AFTER | FIRST)[step]
    async with rig(start_fleet, **by(transport, tmp_path)) as r:
        version = "0.0"
        if step not in FIRST:
            await r.publish("0.0")
            version = "0.1"
        if what == "cancelled":
            await cancel_at(r, version, endpoint, nth)
        else:
            await fail_one_engine(r, version, ENGINE_FAULTS[what](endpoint, nth=nth))


@pytest.mark.parametrize(("transport", "step", "what"), QUICK)
async def test_a_step_fails(start_fleet: StartFleet, tmp_path: Path, transport: str, step: str, what: str) -> None:
    await break_step(start_fleet, tmp_path, transport, step, what)


@pytest.mark.long
@pytest.mark.parametrize(("transport", "step", "what"), [case for case in EVERY_WAY if case not in QUICK])
async def test_a_step_fails_in_every_other_way(
    start_fleet: StartFleet, tmp_path: Path, transport: str, step: str, what: str
) -> None:
    await break_step(start_fleet, tmp_path, transport, step, what)


async def break_trainer(
    start_fleet: StartFleet, tmp_path: Path, transport: str, step: str, how: str, *, first: bool
) -> None:
    async with rig(start_fleet, **by(transport, tmp_path)) as r:
        if not first:
            await r.publish("0.0")
            if step in ("store", "join"):
                await r.transport.aclose()  # else the group is kept
        await fail_trainer(r, "0.1", TRAINER_STEPS[transport][step], how)


@pytest.mark.parametrize(
    ("transport", "step"), [(transport, step) for transport, steps in TRAINER_STEPS.items() for step in steps]
)
async def test_the_trainer_raises(start_fleet: StartFleet, tmp_path: Path, transport: str, step: str) -> None:
    await break_trainer(start_fleet, tmp_path, transport, step, "raises", first=False)


@pytest.mark.parametrize("transport", TRAINER_STEPS)
async def test_a_publication_is_cancelled_while_the_trainer_exports(
    start_fleet: StartFleet, tmp_path: Path, transport: str
) -> None:
    await break_trainer(start_fleet, tmp_path, transport, "middle bucket", "cancelled", first=False)


@pytest.mark.long
@pytest.mark.parametrize("how", ["raises", "cancelled"])
@pytest.mark.parametrize("first", [False, True], ids=["later", "first publication"])
@pytest.mark.parametrize(
    ("transport", "step"), [(transport, step) for transport, steps in TRAINER_STEPS.items() for step in steps]
)
async def test_the_trainer_fails_in_every_way(
    start_fleet: StartFleet, tmp_path: Path, transport: str, step: str, first: bool, how: str
) -> None:
    await break_trainer(start_fleet, tmp_path, transport, step, how, first=first)


async def test_the_trainer_raises_in_the_first_publication(start_fleet: StartFleet, tmp_path: Path) -> None:
    await break_trainer(start_fleet, tmp_path, "broadcast", "middle bucket", "raises", first=True)


async def test_the_trainer_raises_as_it_leaves_a_broken_group(start_fleet: StartFleet) -> None:
    async with rig(start_fleet) as r:
        await r.publish("0.0")
        r.fleet.engines[1].script(refuse("update_weights_from_distributed", nth=2))
        await fail_trainer(r, "0.1", "leaving the weight transfer groups")


async def test_the_router_refuses_every_engine_and_what_is_committed_stays_so(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with rig(start_fleet, restarts=3, copies=tmp_path / "copies") as r:
        r.fleet.router.faults.add(refuse("add_worker", 500, times=4))  # each engine is asked for twice
        with anyio.fail_after(BOUND_S):
            report = await r.publish("0.0")
        assert report.engines == ("engine-0", "engine-1")
        assert r.fleet.controller.fleet().published_version == "0.0"
        with anyio.fail_after(BOUND_S):
            await r.fleet.controller.prepare_rollout(0)
        await eventually(lambda: r.serves(0, "0.0") and r.serves(1, "0.0"))
        assert min(engine.lives for engine in r.fleet.engines) > 1
        assert r.fleet.kinds().count("weight_update_failed") == 0
        await check_after(r, "0.1")
    assert r.fleet.failures == []


async def test_a_router_that_refuses_for_good_ends_the_job_with_its_own_words(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError):  # the rig wants no failure
        async with rig(start_fleet, engines=1, restarts=1, copies=tmp_path / "copies") as r:
            r.fleet.router.faults.add(refuse("add_worker", 500, message="no more", times=None))
            with anyio.fail_after(BOUND_S):
                await r.publish("0.0")
            with anyio.fail_after(BOUND_S), pytest.raises(EngineError, match=r"is not started again.*refused.*no more"):
                await r.fleet.controller.prepare_rollout(0)


async def test_an_engine_that_is_started_again_gets_its_weights_without_a_publication(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with rig(start_fleet, restarts=3, copies=tmp_path / "copies") as r:
        await r.publish("0.0")
        for number in (1, 0):
            await r.fleet.host.kill(f"engine-{number}")
            await eventually(lambda number=number: r.fleet.engines[number].lives == 2 and r.serves(number, "0.0"))
        assert r.complaints() == []
        assert r.fleet.controller.statistics().updates_committed == 1


async def test_weights_that_are_published_again_come_with_a_copy_that_can_be_loaded(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with rig(start_fleet, restarts=5, copies=tmp_path / "copies") as r:
        await r.publish("0.0")
        damaged = await r.copy()
        assert damaged is not None
        (damaged / "model.safetensors").write_bytes(b"damaged")
        for number in (0, 1):
            await r.fleet.host.kill(f"engine-{number}")
        await eventually(lambda: r.fleet.controller.fleet().needs_publication)
        await r.publish("0.0")
        await r.fleet.host.kill("engine-1")
        await eventually(lambda: r.fleet.engines[1].lives == 3 and r.serves(1, "0.0"))
        assert r.complaints() == []
