"""A process group that blocks for ever holds neither the trainer nor any engine but its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import anyio
import pytest

from asyncrl.inference.sglang.engine_api import EngineApi
from asyncrl.tasks import MAY_NOT_RETURN
from asyncrl.weights.transfer import BucketFiller, TransferFault
from asyncrl.weights.transports.broadcast import BroadcastTransport
from asyncrl.weights.transports.process_group import NO_WATCHDOG, PROOF
from tests.scripted import die, hang, refuse
from tests.weights.fake_nccl import CALLS, Blocks, over_fake_nccl
from tests.weights.fakes import ThreadSource, random_tensors
from tests.weights.test_transports import BUCKET_BYTES, JOIN, RECEIVE, Peer, Start, assert_equal, endpoints, hurry
from tests.weights.test_transports import start as start  # a fixture

DEADLINE_S = 1.0
AFTER_S = 1.0
"""Longest from the deadline of one engine to the end of the transfer to the others."""
VICTIM = 3
"""World size of the victim's group: it has two tensor-parallel ranks, and so is known from the others."""


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Blocks]:
    blocks = over_fake_nccl(monkeypatch)
    blocks.world_size = VICTIM
    yield blocks
    blocks.free.set()
    for thread in threading.enumerate():  # one that ends with the interpreter would abort it
        if thread.name.startswith(MAY_NOT_RETURN):
            thread.join(5.0)


def make_nccl(timeout_s: float = DEADLINE_S) -> BroadcastTransport:
    return BroadcastTransport(EngineApi.open, backend="nccl", bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s)


async def all_received(peer: Peer, source: ThreadSource) -> None:
    with anyio.fail_after(5.0):
        await peer.engine.weights.settle()
    assert_equal(peer, source.tensors)


async def test_nccl_goes_through_the_same_code(blocks: Blocks, source: ThreadSource, start: Start) -> None:
    engines = [await start("engine-0"), await start("engine-1", tensor_parallel=2)]
    transport = make_nccl(timeout_s=10.0)
    for seed in (0, 1):
        source.tensors = random_tensors(seed)
        result = await transport.transfer(source, source.payload, endpoints(engines))
        assert not result.failures and result.source_error is None
        for engine in engines:
            await all_received(engine, source)
    for engine in engines:
        messages = [update for update in engine.engine.updates if update["names"] != [PROOF.name]]
        assert len(engine.engine.updates) == len(messages) + 1, "one proof for the group"
        several = [update for update in messages if len(update["names"]) > 1]
        assert several and all(update["load_format"] == "flattened_bucket" for update in several)
    assert blocks.operation_timeouts == {timedelta(seconds=50)}, "torch's timeout comes after ours"
    assert blocks.watched == [False, False] and NO_WATCHDOG not in os.environ
    await transport.aclose()


QUICK = [
    ("constructor", 1),
    ("broadcast", 1),
    *((call, 3) for call in ("broadcast", "settle", "abort", "destructor")),
]
EVERY = [(call, nth) for call in CALLS for nth in (1, 2, 3)]
"""Calls, and in which broadcast of the group: the first proves it, the second is the first bucket."""
NEVER = [("constructor", 2), ("constructor", 3), ("abort", 1), ("destructor", 1)]
REST = [case for case in EVERY if case not in (*QUICK, *NEVER)]


@pytest.mark.parametrize(("call", "nth"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in REST)])
async def test_a_group_that_blocks_for_ever_costs_its_own_engine_alone(
    call: str, nth: int, blocks: Blocks, source: ThreadSource, start: Start
) -> None:
    good, victim = await start("engine-0"), await start("engine-1", tensor_parallel=2)
    transport = make_nccl(timeout_s=10.0 if nth > 1 else DEADLINE_S)
    if nth > 1:  # nothing is in a hurry before that
        assert not (await transport.transfer(source, source.payload, endpoints([good, victim]))).failures
        hurry(transport, DEADLINE_S)
        nth += len(BucketFiller(source.payload.specs, BUCKET_BYTES).buckets)
    blocks.call, blocks.nth = call, nth
    if call in ("abort", "destructor"):  # these come when a group is left
        victim.script(hang(RECEIVE))
        blocks.nth = 1
    with anyio.fail_after(20.0):
        result = await transport.transfer(source, source.payload, endpoints([good, victim]))
    ended_at = time.monotonic()
    assert blocks.reached.wait(5.0), "the call was never reached"
    assert set(result.failures) == {"engine-1"}
    if nth > 1:
        assert result.failures["engine-1"].kind is TransferFault.GONE
    expected = "group did not form" if nth == 1 else "did not take a weight bucket"
    assert f"{expected} within {DEADLINE_S:g} s" in result.failures["engine-1"].reason
    assert result.source_error is None
    assert ended_at - blocks.reached_at < DEADLINE_S + AFTER_S
    await all_received(good, source)
    assert source.thread.statistics().running is None, "the trainer thread is free"
    source.tensors = random_tensors(1)
    hurry(transport, 10.0)
    again = await transport.transfer(source, source.payload, endpoints([good]))
    assert not again.failures and len(good.joined) == 1
    await all_received(good, source)
    await transport.aclose()


@pytest.mark.parametrize("call", ["broadcast", pytest.param("constructor", marks=pytest.mark.long)])
async def test_a_lone_group_that_blocks_ends_the_transfer_with_the_reason(
    call: str, blocks: Blocks, source: ThreadSource, start: Start
) -> None:
    victim = await start("engine-0", tensor_parallel=2)
    blocks.call, blocks.nth = call, 1
    transport = make_nccl()
    with anyio.fail_after(DEADLINE_S + 5.0):
        result = await transport.transfer(source, source.payload, endpoints([victim]))
        await transport.abandon(endpoints([victim]))
        await transport.aclose()
    assert f"did not form within {DEADLINE_S:g} s" in result.failures["engine-0"].reason
    assert not result.touched and source.exported == 0


@pytest.mark.parametrize(
    ("how", "nth"), [("dies", 1), ("dies", 3), ("refuses", 3), pytest.param("refuses", 1, marks=pytest.mark.long)]
)
async def test_an_engine_that_is_known_to_have_failed_is_not_waited_for(
    how: str, nth: int, blocks: Blocks, source: ThreadSource, start: Start
) -> None:
    """Over NCCL the trainer's kernel notices neither; the engine's answer tells."""
    good, bad = await start("engine-0"), await start("engine-1")
    bad.script({"dies": die, "refuses": refuse}[how](RECEIVE, nth=nth))
    transport = make_nccl(timeout_s=60.0)
    with anyio.fail_after(10.0):
        result = await transport.transfer(source, source.payload, endpoints([good, bad]))
    kind = TransferFault.GONE if how == "dies" else TransferFault.REFUSED
    assert {name: failure.kind for name, failure in result.failures.items()} == {"engine-1": kind}
    await all_received(good, source)
    await transport.aclose()


@pytest.mark.parametrize("how", ["refuse", "die", "hang"])
async def test_an_engine_that_does_not_join_keeps_no_other_from_the_weights(
    how: str, blocks: Blocks, source: ThreadSource, start: Start
) -> None:
    good, bad = await start("engine-0"), await start("engine-1")
    bad.script({"refuse": refuse, "die": die, "hang": hang}[how](JOIN))
    transport = make_nccl(timeout_s=DEADLINE_S if how == "hang" else 60.0)
    with anyio.fail_after(10.0):
        result = await transport.transfer(source, source.payload, endpoints([good, bad]))
    assert set(result.failures) == {"engine-1"} and result.source_error is None
    await all_received(good, source)
    await transport.aclose()


async def test_an_engine_that_answered_before_it_had_the_tensors_is_not_believed(
    blocks: Blocks, source: ThreadSource, start: Start
) -> None:
    """It says 200 as its receive is queued; then the last bucket does not reach it."""
    good, victim = await start("engine-0"), await start("engine-1", tensor_parallel=2)
    blocks.call = "broadcast"
    blocks.nth = 1 + len(BucketFiller(source.payload.specs, BUCKET_BYTES).buckets)
    transport = make_nccl()
    with anyio.fail_after(20.0):
        result = await transport.transfer(source, source.payload, endpoints([good, victim]))
    assert len(victim.engine.updates) == blocks.nth, "it answered every bucket"
    assert result.failures["engine-1"].kind is TransferFault.GONE
    assert "did not take a weight bucket within" in result.failures["engine-1"].reason
    await transport.aclose()


async def test_no_receive_is_left_on_an_engine_where_the_trainer_stops_between_two_buckets(
    blocks: Blocks, source: ThreadSource, start: Start
) -> None:
    engine, transport = await start(), make_nccl(timeout_s=10.0)
    source.tensors = {name: tensor for name, tensor in source.tensors.items() if name != "scalar"}
    result = await transport.transfer(source, source.payload, endpoints([engine]))
    assert result.source_error is not None and "scalar" in result.source_error
    assert result.failures["engine-0"].kind is TransferFault.COLLATERAL
    with anyio.fail_after(5.0):
        await engine.engine.weights.settle()
    await transport.aclose()
