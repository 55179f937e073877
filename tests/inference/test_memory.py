"""Order and arguments of offload and onload, which only a GPU can run for real."""

from __future__ import annotations

from typing import cast

import pytest

from asyncrl.data.fleet import EngineEndpoint, EngineState
from asyncrl.errors import EngineError
from asyncrl.inference.engine import ManagedEngine
from asyncrl.inference.engine_api import EngineClient
from asyncrl.inference.memory import Memory
from asyncrl.observability.events import EventLog

pytestmark = pytest.mark.anyio


class RecordingClient:
    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    async def pause(self, mode: str) -> None:
        self.calls.append(("pause", mode))

    async def resume(self) -> None:
        self.calls.append(("resume", None))

    async def release_memory(self, tags: tuple[str, ...]) -> None:
        self.calls.append(("release", tags))

    async def resume_memory(self, tags: tuple[str, ...]) -> None:
        self.calls.append(("take back", tags))


def serving_engine(colocated: bool = True) -> tuple[ManagedEngine, RecordingClient]:
    endpoint = EngineEndpoint("engine-0", 0, "http://127.0.0.1:21000", 1, gpus=(0,), colocated=colocated)
    engine = ManagedEngine(
        endpoint,
        session=None,  # type: ignore[arg-type]
        events=EventLog(None),
    )
    client = RecordingClient()
    engine.client = cast(EngineClient, client)
    engine.version = "0.1"
    for state in (EngineState.PENDING_WEIGHTS, EngineState.UPDATING, EngineState.SERVING):
        engine.move(state)
    return engine, client


async def test_an_engine_is_paused_before_its_memory_goes_and_goes_on_after_all_of_it_is_back() -> None:
    engine, client = serving_engine()
    memory = Memory("cuda")
    await memory.offload([engine], None)
    assert client.calls == [("pause", "retract"), ("release", ("kv_cache", "cuda_graph", "weights"))]
    assert engine.state is EngineState.OFFLOADED
    client.calls.clear()
    await memory.onload([engine], ("weights",))
    assert client.calls == [("take back", ("weights",))]
    assert engine.state is EngineState.OFFLOADED
    await memory.onload([engine], ("kv_cache", "cuda_graph"))
    assert client.calls[1:] == [("take back", ("cuda_graph", "kv_cache")), ("resume", None)]
    assert engine.state is EngineState.SERVING


async def test_offloading_twice_and_onloading_what_is_there_are_nothing_to_do() -> None:
    engine, client = serving_engine()
    memory = Memory("cuda")
    await memory.onload([engine], None)
    await memory.offload([engine], ("kv_cache",))
    await memory.offload([engine], ("kv_cache",))
    assert client.calls == [("pause", "retract"), ("release", ("kv_cache",))]


async def test_an_engine_with_gpus_of_its_own_keeps_its_memory() -> None:
    engine, client = serving_engine(colocated=False)
    await Memory("cuda").offload([engine], None)
    assert client.calls == []
    assert engine.state is EngineState.SERVING


async def test_an_unknown_tag_is_refused_with_those_there_are() -> None:
    with pytest.raises(EngineError, match=r"unknown memory tags \['kv'\]; there are kv_cache, cuda_graph, weights"):
        await Memory("cuda").offload([], ("kv",))
