"""Offload and onload of engines that share a GPU with the trainer.

Invariants
- An engine is paused before the first of its memory goes and goes on after the last is back; requests wait in it.
- On CPU nothing is sent: there the endpoints end the engine's process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio

from asyncrl.config.layout import Device
from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError
from asyncrl.inference.engine import ManagedEngine

TAGS = ("kv_cache", "cuda_graph", "weights")
"""Memory that an engine releases by name; onload goes in the opposite order."""


class Memory:
    """Moves engine memory by tag."""

    def __init__(self, device: Device) -> None:
        self._device = device

    async def offload(self, engines: Sequence[ManagedEngine], tags: Sequence[str] | None) -> None:
        async def one(engine: ManagedEngine) -> None:
            due = tuple(tag for tag in TAGS if tag in wanted and tag not in engine.offloaded)
            if not due:
                return
            if not engine.offloaded:
                await engine.client.pause("retract")
                engine.move(EngineState.OFFLOADED, ", ".join(due))
            await engine.client.release_memory(due)
            engine.offloaded |= set(due)

        wanted = self._checked(tags)
        await _each(engines, one, (EngineState.SERVING, EngineState.PENDING_WEIGHTS, EngineState.OFFLOADED))

    async def onload(self, engines: Sequence[ManagedEngine], tags: Sequence[str] | None) -> None:
        async def one(engine: ManagedEngine) -> None:
            due = tuple(tag for tag in reversed(TAGS) if tag in wanted and tag in engine.offloaded)
            if not due:
                return
            await engine.client.resume_memory(due)
            engine.offloaded -= set(due)
            if not engine.offloaded:
                await engine.client.resume()
                engine.move(EngineState.SERVING if engine.version else EngineState.PENDING_WEIGHTS)

        wanted = self._checked(tags)
        await _each(engines, one, (EngineState.OFFLOADED,))

    def _checked(self, tags: Sequence[str] | None) -> frozenset[str]:
        if self._device == "cpu":
            raise EngineError("engines on CPU cannot release memory: SGLang's memory endpoints need a GPU")
        unknown = sorted(set(tags or ()) - set(TAGS))
        if unknown:
            raise EngineError(f"unknown memory tags {unknown}; there are {', '.join(TAGS)}")
        return frozenset(TAGS if tags is None else tags)


async def _each(
    engines: Sequence[ManagedEngine],
    step: Callable[[ManagedEngine], Awaitable[None]],
    states: Sequence[EngineState],
) -> None:
    async def one(engine: ManagedEngine) -> None:
        await step(engine)

    async with anyio.create_task_group() as task_group:
        for engine in engines:
            if engine.endpoint.colocated and engine.state in states:
                task_group.start_soon(one, engine)
