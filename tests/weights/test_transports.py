"""The transports against engines that really receive: a gloo group, shared memory, a directory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.config import Config
from asyncrl.data.fleet import EngineEndpoint
from asyncrl.errors import WeightUpdateError
from asyncrl.inference.sglang.engine_api import EngineApi
from asyncrl.weights.buckets import TensorSpec
from asyncrl.weights.transfer import BucketFiller, TransferFault, Transport
from asyncrl.weights.transports import make_transport
from asyncrl.weights.transports.broadcast import BroadcastTransport
from asyncrl.weights.transports.broadcast_sink import is_flattened
from asyncrl.weights.transports.disk import DiskTransport
from asyncrl.weights.transports.tensor import TensorTransport
from tests.scripted import Fault, ScriptedEngine, die, hang, instead, refuse
from tests.weights.fakes import ThreadSource, random_tensors

BUCKET_BYTES = 64 * 1024
RECEIVE = "update_weights_from_distributed"
JOIN = "init_weights_update_group"
ENDPOINTS = {"broadcast": RECEIVE, "tensor": "update_weights_from_tensor", "disk": "update_weights_from_disk"}
Make = Callable[..., Transport]


@dataclass(frozen=True, slots=True)
class Peer:
    """A scripted engine that is paused, with an open session, and its address."""

    engine: ScriptedEngine
    endpoint: EngineEndpoint

    def script(self, *faults: Fault) -> None:
        self.engine.script(*faults)

    @property
    def flushes(self) -> list[bool]:
        return [update["flush_cache"] for update in self.engine.updates]

    @property
    def joined(self) -> list[str]:
        return self.engine.weights.joined


Start = Callable[..., Coroutine[Any, Any, Peer]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Call with an engine id, and `generation` or `tensor_parallel`."""
    engines: list[ScriptedEngine] = []
    async with anyio.create_task_group() as task_group:

        async def start_one(engine_id: str = "engine-0", generation: int = 1, tensor_parallel: int = 1) -> Peer:
            zeros = {name: torch.zeros_like(tensor) for name, tensor in random_tensors().items()}
            engine = ScriptedEngine(zeros, tensor_parallel=tensor_parallel)
            engines.append(engine)
            await task_group.start(engine.run)
            async with EngineApi.open(engine_id, engine.url) as client:
                await client.pause()
                await client.begin_weight_update()
            return Peer(engine, EngineEndpoint(engine_id, generation, engine.url, tensor_parallel))

        yield start_one
        for engine in engines:
            engine.kill()


def endpoints(peers: Iterable[Peer]) -> tuple[EngineEndpoint, ...]:
    return tuple(peer.endpoint for peer in peers)


def make_broadcast(timeout_s: float = 10.0) -> BroadcastTransport:
    return BroadcastTransport(EngineApi.open, backend="gloo", bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s)


def make_tensor(timeout_s: float = 10.0) -> TensorTransport:
    return TensorTransport(EngineApi.open, bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s)


@pytest.fixture
def make_disk(tmp_path: Path) -> Make:
    def make(timeout_s: float = 10.0) -> DiskTransport:
        return DiskTransport(
            EngineApi.open, directory=tmp_path / "weights", bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s
        )

    return make


@pytest.fixture(params=["broadcast", "tensor", "disk"])
def make(request: pytest.FixtureRequest, make_disk: Make) -> Make:
    return {"broadcast": make_broadcast, "tensor": make_tensor, "disk": make_disk}[request.param]


def assert_equal(peer: Peer, tensors: dict[str, Tensor]) -> None:
    held = peer.engine.weights.tensors
    assert held.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert held[name].dtype == tensor.dtype
        assert torch.equal(held[name], tensor), name


async def test_every_engine_gets_every_byte_again_and_again(make: Make, source: ThreadSource, start: Start) -> None:
    engines = [await start("engine-0"), await start("engine-1", tensor_parallel=2)]
    transport = make()
    for seed in (0, 1, 2):
        source.tensors = random_tensors(seed)
        result = await transport.transfer(source, source.payload, endpoints(engines))
        assert not result.failures and result.source_error is None and result.touched
        assert result.bytes_sent == sum(t.nbytes for t in source.tensors.values())
        for engine in engines:
            assert_equal(engine, source.tensors)
            assert engine.flushes[-1] and not any(engine.flushes[:-1])
            engine.engine.updates.clear()
    await transport.aclose()
    await transport.aclose()


@pytest.fixture
def make_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """The transport of a job; call with its kind and settings of the section `weights`."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # scripted engines join gloo groups

    def make(kind: Literal["broadcast", "tensor", "disk"], **weights: Any) -> Transport:
        config = Config.model_validate({"run": {"dir": tmp_path}, "weights": weights})
        return make_transport(config, kind, open_engine=EngineApi.open)

    return make


@pytest.mark.parametrize("kind", ENDPOINTS)
@pytest.mark.parametrize("on_update", ["retract", "in_place", "wait", "abort"])
async def test_a_job_has_engines_empty_their_caches_unless_its_requests_keep_their_kv(
    make_for: Make, source: ThreadSource, start: Start, kind: str, on_update: str
) -> None:
    engine, transport = await start(), make_for(kind, on_update=on_update)
    result = await transport.transfer(source, source.payload, endpoints([engine]))
    assert not result.failures and ENDPOINTS[kind] in engine.engine.calls
    assert engine.flushes[-1] is (on_update != "in_place")
    await transport.aclose()


@pytest.mark.parametrize("kind", ["broadcast", "tensor"])
@pytest.mark.parametrize(("bucket_mib", "messages"), [(1, 3), (2, 2)])
async def test_buckets_of_a_job_are_as_large_as_it_asks_for(
    make_for: Make, start: Start, kind: str, bucket_mib: int, messages: int
) -> None:
    engine, transport = await start(), make_for(kind, bucket_mib=bucket_mib)
    with closing(ThreadSource({name: torch.zeros(1 << 18) for name in "abc"})) as source:
        assert not (await transport.transfer(source, source.payload, endpoints([engine]))).failures
        assert engine.engine.calls.count(ENDPOINTS[kind]) == messages
        await transport.aclose()


async def test_small_tensors_share_a_message_and_large_ones_do_not(source: ThreadSource, start: Start) -> None:
    engine = await start()
    transport = BroadcastTransport(EngineApi.open, backend="gloo", bucket_bytes=1 << 20, timeout_s=10.0)
    await transport.transfer(source, source.payload, endpoints([engine]))
    assert_equal(engine, source.tensors)
    assert [update["load_format"] for update in engine.engine.updates] == ["flattened_bucket"]
    assert not is_flattened((TensorSpec("a", "float32", (1024, 1024)), TensorSpec("b", "float32", (8,))))
    assert not is_flattened((TensorSpec("a", "float32", (8,)),))
    unaligned = (TensorSpec("a", "bfloat16", (3,)), TensorSpec("b", "float32", (8,)))
    assert not is_flattened(unaligned) and is_flattened(unaligned[::-1]), "an engine refuses the first"
    await transport.aclose()


async def test_a_group_is_kept_while_its_engine_is_the_same_and_rebuilt_when_not(
    source: ThreadSource, start: Start
) -> None:
    first, second = await start("engine-0"), await start("engine-1")
    reborn = await start("engine-1", generation=2)
    transport = make_broadcast()
    await transport.transfer(source, source.payload, endpoints([first, second]))
    await transport.transfer(source, source.payload, endpoints([first, second]))
    await transport.transfer(source, source.payload, endpoints([first, reborn]))
    assert [len(peer.joined) for peer in (first, second, reborn)] == [1, 1, 1], "the first engine's group is as before"
    assert_equal(reborn, source.tensors)
    await transport.aclose()


async def test_an_engine_leaves_the_group_that_the_trainer_left_before_it_joins_the_next(
    source: ThreadSource, start: Start
) -> None:
    engine, transport = await start(), make_broadcast()
    await transport.transfer(source, source.payload, endpoints([engine]))
    await transport.abandon(endpoints([engine]))
    await transport.transfer(source, source.payload, endpoints([engine]))
    assert len(set(engine.joined)) == 2 and engine.engine.weights.groups.keys() == {engine.joined[1]}
    await transport.aclose()


async def test_an_engine_that_goes_on_after_the_job_keeps_no_group_of_it(source: ThreadSource, start: Start) -> None:
    own, external = await start("engine-0"), await start("engine-1")
    engines = [own.endpoint, replace(external.endpoint, external=True)]
    transport = make_broadcast()
    await transport.transfer(source, source.payload, engines)
    await transport.aclose()
    assert not external.engine.weights.groups and external.joined
    assert "destroy_weights_update_group" not in own.engine.calls, "its process ends with the job"


@pytest.mark.parametrize("step", ["before", "after"])
@pytest.mark.parametrize("bucket", [0, 2])
@pytest.mark.parametrize("position", [0, 1, 2])
async def test_a_dead_engine_fails_alone(
    step: str, bucket: int, position: int, source: ThreadSource, start: Start
) -> None:
    engines = [await start(f"engine-{number}") for number in range(3)]
    victim, survivors = engines[position], [*engines[:position], *engines[position + 1 :]]
    transport = make_broadcast()
    victim.script(die(RECEIVE, when=step, nth=bucket + 1))
    result = await transport.transfer(source, source.payload, endpoints(engines))
    assert {name: failure.kind for name, failure in result.failures.items()} == {
        victim.endpoint.engine_id: TransferFault.GONE
    }
    assert result.source_error is None
    assert source.exported == len(source.tensors)
    for survivor in survivors:
        assert_equal(survivor, source.tensors)
    again = await transport.transfer(source, source.payload, endpoints(survivors))
    assert not again.failures and all(len(survivor.joined) == 1 for survivor in survivors)
    await transport.aclose()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_engine_that_refuses_a_bucket_takes_nothing_from_the_others(
    when: str, source: ThreadSource, start: Start
) -> None:
    buckets = len(BucketFiller(source.payload.specs, BUCKET_BYTES).buckets)
    for nth in (2, buckets):
        good, refusing = await start("engine-0"), await start("engine-1")
        transport = make_broadcast()
        refusing.script(refuse(RECEIVE, when=when, nth=nth))
        with anyio.fail_after(5.0):  # far below the bucket timeout: nobody waits for it
            result = await transport.transfer(source, source.payload, endpoints([good, refusing]))
        assert {name: failure.kind for name, failure in result.failures.items()} == {"engine-1": TransferFault.REFUSED}
        assert result.source_error is None
        assert_equal(good, source.tensors)
        await transport.aclose()


def hurry(transport: BroadcastTransport, timeout_s: float) -> None:
    """From now on the trainer's end of the wire waits no longer for engines; called in the trainer thread."""
    transport._timeout_s = timeout_s
    for link in transport._links.values():
        link.group.timeout_s = timeout_s


@pytest.mark.parametrize("bucket", ["second", "last"])
async def test_a_hanging_engine_costs_one_bucket_timeout_and_the_others_get_everything(
    bucket: str, source: ThreadSource, start: Start
) -> None:
    good, hanging = await start("engine-0"), await start("engine-1")
    transport = make_broadcast()
    buckets = BucketFiller(source.payload.specs, BUCKET_BYTES).buckets
    nth = 2 if bucket == "second" else len(buckets)
    hanging.script(hang(RECEIVE, nth=nth))
    at = sum(map(len, buckets[: nth - 1]))
    source.before_tensor = lambda number: hurry(transport, 1.0) if number == at else None
    with anyio.fail_after(10.0):
        result = await transport.transfer(source, source.payload, endpoints([good, hanging]))
    assert {name: failure.kind for name, failure in result.failures.items()} == {"engine-1": TransferFault.GONE}
    assert result.source_error is None
    assert_equal(good, source.tensors)
    await transport.aclose()


@pytest.mark.parametrize("how", ["refuse", "die", "hang"])
async def test_an_engine_that_does_not_join_keeps_no_other_from_the_weights(
    how: str, source: ThreadSource, start: Start
) -> None:
    good, bad = await start("engine-0"), await start("engine-1")
    transport = make_broadcast(timeout_s=1.0 if how == "hang" else 60.0)
    bad.script({"refuse": refuse, "die": die, "hang": hang}[how](JOIN))
    with anyio.fail_after(10.0):
        result = await transport.transfer(source, source.payload, endpoints([good, bad]))
    expected = TransferFault.REFUSED if how == "refuse" else TransferFault.GONE
    assert {name: failure.kind for name, failure in result.failures.items()} == {"engine-1": expected}
    assert result.touched and result.source_error is None
    assert_equal(good, source.tensors)
    await transport.aclose()


async def test_engines_are_touched_only_where_one_has_joined(source: ThreadSource, start: Start) -> None:
    engines = [await start("engine-0"), await start("engine-1")]
    for engine in engines:
        engine.script(refuse(JOIN))
    transport = make_broadcast()
    result = await transport.transfer(source, source.payload, endpoints(engines))
    assert not result.touched and result.source_error is not None and set(result.failures) == {"engine-0", "engine-1"}
    assert source.exported == 0
    again = await transport.transfer(source, source.payload, endpoints(engines))
    assert not again.failures
    await transport.aclose()


async def test_an_engine_that_refuses_the_group_is_not_waited_for(source: ThreadSource, start: Start) -> None:
    engine = await start()
    engine.script(refuse(JOIN))
    transport = make_broadcast(timeout_s=60.0)
    with anyio.fail_after(20.0):
        result = await transport.transfer(source, source.payload, endpoints([engine]))
    assert result.failures["engine-0"].kind is TransferFault.REFUSED and not result.touched
    await transport.aclose()


async def test_a_cancelled_transfer_frees_engines_and_the_next_one_works(
    make: Make, source: ThreadSource, start: Start
) -> None:
    engines = [await start("engine-0"), await start("engine-1")]
    transport = make()
    with anyio.CancelScope() as scope:

        async def cancel() -> None:
            scope.cancel()

        engines[1].script(instead(RECEIVE, cancel, nth=2), instead(ENDPOINTS["tensor"], cancel, nth=2))
        engines[1].script(instead(ENDPOINTS["disk"], cancel))
        with anyio.fail_after(8.0, shield=False):
            await transport.transfer(source, source.payload, endpoints(engines))
    assert scope.cancelled_caught
    with anyio.fail_after(5.0):
        await transport.abandon(endpoints(engines))
    for engine in engines:
        engine.engine.faults.clear()
        engine.engine.weights.reset()
    await source.call(lambda: None, what="turn after the cancelled export", timeout_s=10.0)

    result = await transport.transfer(source, source.payload, endpoints(engines))
    assert not result.failures and result.source_error is None
    for engine in engines:
        assert_equal(engine, source.tensors)
    await transport.aclose()


async def test_one_failing_engine_does_not_stop_handover_to_the_others(
    source: ThreadSource, start: Start, make_disk: Make
) -> None:
    for make_one, step in ((make_tensor, "tensor"), (make_disk, "disk")):
        good, bad = await start("engine-0"), await start("engine-1")
        bad.script(die(ENDPOINTS[step]))
        transport = make_one()
        result = await transport.transfer(source, source.payload, endpoints([good, bad]))
        assert set(result.failures) == {"engine-1"} and result.source_error is None
        assert_equal(good, source.tensors)
        await transport.aclose()


@pytest.mark.parametrize("damage", ["renamed", "reshaped", "missing", "extra"])
async def test_an_export_that_differs_from_its_specs_never_reaches_an_engine_whole(
    damage: str, make: Make, source: ThreadSource, start: Start
) -> None:
    """Engines ignore unknown names and answer 200, so it has to be noticed here."""
    tensors = source.tensors
    if damage == "renamed":
        source.tensors = {name.replace("layer.3.weight", "layer.three.weight"): t for name, t in tensors.items()}
    elif damage == "reshaped":
        source.tensors = tensors | {"layer.3.weight": torch.zeros(32, 24)}
    elif damage == "missing":
        source.tensors = {name: t for name, t in tensors.items() if name != "scalar"}
    else:
        source.tensors = tensors | {"surplus": torch.zeros(3)}
    engine = await start()
    transport = make()
    result = await transport.transfer(source, source.payload, endpoints([engine]))
    assert result.source_error is not None
    assert {"renamed": "three", "reshaped": "(32, 24)", "missing": "scalar", "extra": "surplus"}[damage] in (
        result.source_error
    )
    await transport.aclose()


def test_a_filler_returns_buckets_exactly_as_planned() -> None:
    tensors = random_tensors()
    specs = [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()]
    filler = BucketFiller(specs, BUCKET_BYTES)
    full: Iterable[tuple[int, list[Tensor]] | None] = [filler.add(name, tensor) for name, tensor in tensors.items()]
    buckets = [bucket for bucket in full if bucket is not None]
    assert [index for index, _ in buckets] == list(range(len(filler.buckets)))
    assert [t.shape for _, bucket in buckets for t in bucket] == [t.shape for t in tensors.values()]
    filler.check_complete()
    with pytest.raises(WeightUpdateError, match="more"):
        filler.add("more", torch.zeros(1))


async def test_files_on_disk_stay_as_they_are_while_they_are_in_use_and_go_after_that(
    make_disk: Make, source: ThreadSource, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "weights" / "of-a-killed-job").mkdir(parents=True)
    engine, transport = await start(), make_disk()
    await transport.transfer(source, source.payload, endpoints([engine]))
    published, expected = transport.copy, source.tensors
    assert published is not None
    for seed in (1, 2, 3):
        source.tensors = random_tensors(seed)
        await transport.transfer(source, source.payload, endpoints([engine]), [published])
        assert_equal(engine, source.tensors)
    held = {name: tensor for file in published.iterdir() for name, tensor in load_file(file).items()}
    assert held.keys() == expected.keys() and all(torch.equal(held[name], expected[name]) for name in held)
    assert set((tmp_path / "weights").iterdir()) == {published, transport.copy}
    await transport.transfer(source, source.payload, endpoints([engine]))
    assert list((tmp_path / "weights").iterdir()) == [transport.copy]
    await transport.aclose()
