"""The weight transaction over NCCL, in miniature: the steps of the transfer broken in every way.

Everything is as in `test_transaction_faults`, which says what must be so afterwards, but for the process groups: they
behave as NCCL's do by its sources (tests/weights/fake_nccl.py). What engines do before and after the transfer is the
same code there.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from functools import partial

import anyio
import pytest

from asyncrl.errors import TrainerError
from asyncrl.tasks import MAY_NOT_RETURN
from tests.inference.conftest import StartFleet
from tests.inference.transaction_rig import (
    BOUND_S,
    ENGINE_FAULTS,
    HEALTHY_S,
    TRANSFER_S,
    Rig,
    cancel_at,
    check_after,
    fail_one_engine,
    fail_trainer,
    set_deadlines,
    shorten_deadlines,
)
from tests.inference.transaction_rig import rig as any_rig
from tests.weights.fake_nccl import CALLS, Blocks, over_fake_nccl

pytestmark = pytest.mark.anyio

rig = partial(any_rig, nccl=True)
FAULTS = (*ENGINE_FAULTS, "cancelled")
RECEIVE = "update_weights_from_distributed"
STEPS: dict[str, tuple[str, int]] = {
    "join group": ("init_weights_update_group", 1),
    "proof of the group": (RECEIVE, 1),
    "first bucket": (RECEIVE, 1),
    "middle bucket": (RECEIVE, 2),
    "last bucket": (RECEIVE, 3),
    "end session": ("end_weight_update", 1),
    "checksum": ("weights_checker", 1),
    "continue": ("continue_generation", 1),
}
"""Step → the engine's endpoint, and which call of it in a publication after the first."""
EVERY_WAY = [(step, what) for step in STEPS for what in FAULTS]
TURNS = itertools.cycle(FAULTS)
QUICK = [(step, what) for step, what in EVERY_WAY if step == "middle bucket"]
QUICK += [(step, next(TURNS)) for step in ("join group", "proof of the group", "first bucket", "last bucket")]
COMMITTED_WITHIN_S = 1.0
"""After the deadline of the engine that was lost."""


@pytest.fixture(autouse=True)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Blocks]:
    set_deadlines(request, monkeypatch)
    blocks = over_fake_nccl(monkeypatch)
    yield blocks
    blocks.free.set()
    for thread in threading.enumerate():  # one that ends with the interpreter would abort it
        if thread.name.startswith(MAY_NOT_RETURN):
            thread.join(5.0)


async def break_step(r: Rig, step: str, what: str) -> None:
    await r.publish("0.0")
    if step in ("join group", "proof of the group"):
        await r.transport.aclose()  # else the group is kept
    if what == "cancelled":
        await cancel_at(r, "0.1", *STEPS[step])
    else:
        endpoint, nth = STEPS[step]
        await fail_one_engine(r, "0.1", ENGINE_FAULTS[what](endpoint, nth=nth))


@pytest.mark.parametrize(("step", "what"), QUICK)
async def test_a_step_fails(start_fleet: StartFleet, step: str, what: str) -> None:
    async with rig(start_fleet) as r:
        await break_step(r, step, what)


@pytest.mark.long
@pytest.mark.parametrize(("step", "what"), [case for case in EVERY_WAY if case not in QUICK])
async def test_a_step_fails_in_every_other_way(start_fleet: StartFleet, step: str, what: str) -> None:
    async with rig(start_fleet) as r:
        await break_step(r, step, what)


@pytest.mark.parametrize("step", ["join", "middle bucket"])
async def test_the_trainer_raises(start_fleet: StartFleet, step: str) -> None:
    async with rig(start_fleet) as r:
        await r.publish("0.0")
        if step == "join":
            await r.transport.aclose()
        await fail_trainer(r, "0.1", "weight transfer groups" if step == "join" else 3)


@pytest.mark.parametrize(
    ("call", "nth"),
    [("constructor", 1), ("broadcast", 3)]
    + [pytest.param(call, nth, marks=pytest.mark.long) for call in CALLS[1:4] for nth in (1, 2, 3)],
)
async def test_a_call_to_one_group_never_returns(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch, blocks: Blocks, call: str, nth: int
) -> None:
    """The first group that comes there; its engine is lost, the other one serves, and so it goes on."""
    shorten_deadlines(monkeypatch)
    async with rig(start_fleet) as r:
        blocks.world_size, blocks.nth, blocks.once = 2, nth, True
        blocks.call = call
        with anyio.fail_after(BOUND_S):
            report = await r.publish("0.0")
        assert len(report.engines) == len(report.failed) == 1
        reason = next(iter(report.failed.values()))
        told = "group did not form" if nth == 1 else "did not take a weight bucket"
        assert f"{told} within {TRANSFER_S:g} s" in reason
        assert report.transfer_s < TRANSFER_S + COMMITTED_WITHIN_S
        blocks.call = None
        await check_after(r, "0.1")


@pytest.mark.parametrize("where", ["between tensors", "on the GPU"])
async def test_an_export_that_does_not_go_on_ends_with_that_reason(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch, blocks: Blocks, where: str
) -> None:
    """A rank that hangs, and not an engine: in twice the time of a bucket, whatever the number of buckets."""
    shorten_deadlines(monkeypatch)
    go_on = threading.Event()

    def hang_at_the_third(number: int) -> None:
        if number == 3:
            go_on.wait()

    async with rig(start_fleet) as r:
        await r.publish("0.0")
        if where == "on the GPU":  # NCCL only queues what another rank does not take part in
            buckets = itertools.count()
            blocks.computed = lambda: hang_at_the_third(next(buckets) + 2)
        else:
            r.source.before_tensor = hang_at_the_third
        began = anyio.current_time()
        with anyio.fail_after(BOUND_S), pytest.raises(TrainerError, match="did not go on for 2 s"):
            await r.publish("0.1")
        hung_s = anyio.current_time() - began
        go_on.set()
        assert 2 * TRANSFER_S <= hung_s < 2 * TRANSFER_S + HEALTHY_S
        assert not any(engine.paused for engine in r.fleet.engines)
        await check_after(r, "0.1 again")
