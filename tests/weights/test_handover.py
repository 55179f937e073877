"""Handover of weights from several trainer ranks to the engines on their GPUs, over threads and shared memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import EngineError, TrainerError, WeightUpdateError
from asyncrl.observability.waits import WAITS
from asyncrl.weights.handover import Desk, Offer, Stopped, Taken
from asyncrl.weights.transfer import BucketFiller, TransferFault, TransferResult
from asyncrl.weights.transports import tensor_sink
from asyncrl.weights.transports.tensor import TensorTransport
from tests.inference.conftest import eventually
from tests.weights.gang import Gang, Reader, opener, readers

pytestmark = pytest.mark.anyio

BUCKET_BYTES = 64 * 1024
LAYOUTS: list[dict[str, tuple[int, ...]]] = [
    {"engine-0": (0,), "engine-1": (1,), "engine-2": (2,), "engine-3": (3,)},
    {"engine-0": (0, 1), "engine-1": (2, 3)},
    {"engine-0": (0, 1, 2, 3)},
    {"engine-0": (3, 1)},
    {"engine-0": (2,), "engine-1": (0,)},
]


@pytest.fixture
def gang() -> Iterator[Gang]:
    gang = Gang(4)
    yield gang
    gang.close()


def transport_to(engines: dict[str, Reader], timeout_s: float = 10.0) -> TensorTransport:
    return TensorTransport(opener(engines), bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s)


async def transfer(transport: TensorTransport, gang: Gang, engines: dict[str, Reader]) -> TransferResult:
    return await transport.transfer(gang, gang.payload, [engine.endpoint for engine in engines.values()])


def check_whole(gang: Gang, engine: Reader) -> None:
    """Each tensor-parallel rank has every tensor, and from the trainer rank on its own GPU."""
    for rank, held in zip(engine.endpoint.trainer_ranks, engine.held, strict=True):
        assert held.keys() == gang.tensors[rank].keys()
        for name, tensor in gang.tensors[rank].items():
            assert held[name].dtype == tensor.dtype and torch.equal(held[name], tensor), (rank, name)


def buckets_of(gang: Gang) -> int:
    return len(BucketFiller(gang.specs, BUCKET_BYTES).buckets)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
async def test_each_rank_of_an_engine_reads_from_the_trainer_rank_on_its_gpu(
    gang: Gang, layout: dict[str, tuple[int, ...]]
) -> None:
    engines = readers(layout)
    transport = transport_to(engines)
    for _ in range(2):
        result = await transfer(transport, gang, engines)
        assert not result.failures and result.source_error is None and result.touched
        assert result.bytes_sent == sum(spec.size_bytes for spec in gang.specs)
        for engine in engines.values():
            check_whole(gang, engine)
            assert engine.flushes[-1] and not any(engine.flushes[:-1])
            engine.flushes.clear()
    offering = {rank for ranks in layout.values() for rank in ranks} - {0}  # rank 0 offers by itself
    assert sorted(gang.made) == sorted((rank, b) for rank in offering for b in range(buckets_of(gang)) for _ in "12")
    assert gang.walked == [2 * len(gang.specs)] * 4


async def refuse() -> None:
    error = EngineError("engine: it refused")
    error.status = 400  # type: ignore[attr-defined]
    raise error


async def vanish() -> None:
    raise EngineError("engine: connection reset")


@settings(max_examples=20)
@given(
    layout=st.sampled_from(LAYOUTS),
    victims=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.sampled_from([refuse, vanish])), max_size=3),
)
def test_an_engine_that_fails_costs_no_other_one_a_byte_and_gets_no_further_handle(
    layout: dict[str, tuple[int, ...]], victims: list[tuple[int, int, Callable[[], Any]]]
) -> None:
    gang, engines = Gang(4), readers(layout)
    lost_at: dict[str, int] = {}
    for number, bucket, fault in victims:
        engine_id = f"engine-{number % len(engines)}"
        engines[engine_id].fault, engines[engine_id].fault_at = fault, bucket
        lost_at[engine_id] = bucket
    lost_at = {engine_id: bucket for engine_id, bucket in lost_at.items() if bucket < buckets_of(gang)}
    try:
        result = anyio.run(transfer, transport_to(engines), gang, engines)
    finally:
        gang.close()
    assert result.failures.keys() == lost_at.keys() and result.source_error is None
    for engine_id, engine in engines.items():
        if engine_id not in lost_at:
            check_whole(gang, engine)
        last = lost_at.get(engine_id, buckets_of(gang) - 1)
        for rank in {*engine.endpoint.trainer_ranks} - {0}:
            assert [bucket for offerer, bucket in gang.made if offerer == rank] == list(range(last + 1))
    assert gang.walked == [len(gang.specs)] * 4, "every rank walks to the end"


async def test_an_engine_that_hangs_costs_one_timeout(gang: Gang) -> None:
    engines = readers(LAYOUTS[1])
    engines["engine-1"].fault, engines["engine-1"].fault_at = anyio.sleep_forever, 1
    with anyio.fail_after(10):
        result = await transfer(transport_to(engines, timeout_s=0.5), gang, engines)
    assert {name: failure.kind for name, failure in result.failures.items()} == {"engine-1": TransferFault.GONE}
    check_whole(gang, engines["engine-0"])


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("number", [0, 5, "end"])
async def test_a_rank_that_hangs_ends_the_transfer_by_its_name(gang: Gang, rank: int, number: int | str) -> None:
    engines, held = readers(LAYOUTS[0]), threading.Event()
    at = len(gang.specs) if number == "end" else number
    gang.before_tensor = lambda r, n: (held.wait(20), None)[1] if (r, n) == (rank, at) else None
    told = "end of the weight export" if number == "end" else f"trainer rank {rank} offered no tensors of bucket"
    try:
        with anyio.fail_after(10), pytest.raises(TrainerError, match=told) as caught:
            await transfer(transport_to(engines, timeout_s=0.5), gang, engines)
        assert ("the stack of rank 2" in str(caught.value)) == (rank == 2 or number == "end")
        await eventually(lambda: not any(wait.what.startswith("handover") for wait in WAITS.snapshot()), 3.0)
    finally:
        held.set()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_cannot_offer_ends_the_transfer_with_its_reason_and_the_next_one_works(
    gang: Gang, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, share = readers(LAYOUTS[1]), tensor_sink.TensorSink._share

    def fail(sink: Any, bucket: Any, tensors: Any) -> Any:
        if tensors[0] is gang.tensors[rank]["big"]:
            raise WeightUpdateError("no memory")
        return share(sink, bucket, tensors)

    monkeypatch.setattr(tensor_sink.TensorSink, "_share", fail)
    transport = transport_to(engines)
    with anyio.fail_after(10):
        result = await transfer(transport, gang, engines)
    assert result.source_error == ("no memory" if rank == 0 else "trainer rank 1: no memory")
    assert not result.failures and result.touched
    assert gang.walked == [len(gang.specs)] * 4, "every rank walks to the end"
    monkeypatch.undo()
    assert (await transfer(transport, gang, engines)).source_error is None
    for engine in engines.values():
        check_whole(gang, engine)


@pytest.mark.parametrize("bucket", [0, 2])
async def test_a_transfer_that_is_cancelled_frees_every_rank_and_the_next_one_works(gang: Gang, bucket: int) -> None:
    engines, scope = readers(LAYOUTS[1]), anyio.CancelScope()

    async def cancel() -> None:
        scope.cancel()
        await anyio.sleep_forever()

    engines["engine-1"].fault, engines["engine-1"].fault_at = cancel, bucket
    transport = transport_to(engines)
    with anyio.fail_after(10):
        with scope:
            await transfer(transport, gang, engines)
        assert scope.cancelled_caught
        await transport.abandon([engine.endpoint for engine in engines.values()])
        for engine in engines.values():
            engine.fault = None
        result = await transfer(transport, gang, engines)
    assert result.source_error is None and not result.failures
    for engine in engines.values():
        check_whole(gang, engine)
    assert gang.walked == [2 * len(gang.specs)] * 4


def test_a_desk_hears_what_is_said_before_it_asks_and_nothing_of_earlier_exports() -> None:
    sent: list[Offer] = []
    desk = Desk(sent.append)
    desk.hear(Stopped(1, "the transfer ended"))
    desk.hear(Taken(1, 9))
    with pytest.raises(WeightUpdateError, match="not taken within"):
        desk.offer(Offer(2, 0, "h"), 0.01)
    desk.hear(Taken(2, 0))
    assert desk.offer(Offer(2, 0, "h"), 10.0)
    desk.hear(Stopped(2))
    assert not desk.offer(Offer(2, 1, "h"), 10.0)
    desk.hear(Stopped(4, "cancelled"))
    desk.hear(Stopped(3, "late"))
    with pytest.raises(WeightUpdateError, match="cancelled"):
        desk.offer(Offer(4, 0, "h"), 10.0)
    assert [offer.export for offer in sent] == [2, 2], "nothing is offered where nobody reads"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}
