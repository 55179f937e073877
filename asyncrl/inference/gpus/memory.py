"""Offload and onload of engines that share GPUs with the trainer.

Invariants
- An engine is paused before the first of its memory goes and goes on after the last is back; requests wait in it.
- After `offload` no engine holds what was to go: one that refuses, hangs or was left halfway by a cancellation is
  killed, as is one that fails to take its memory back. It is started again in the engines' turn (`shared_gpus.py`).
- Released weights are gone (the engine keeps no copy of them in host memory): an engine that has taken that memory back
  holds no version, and serves only after a publication or with a kept copy.
- Memory moves neither while weights are published nor while an engine starts or loads weights: that is waited for.
- An `offload` that ends before any memory was asked for leaves the turn with the engines.
- On CPU nothing is sent: there the endpoints end the engine's process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio

from asyncrl.config import Config
from asyncrl.config.layout import Device
from asyncrl.data.fleet import EngineState
from asyncrl.errors import EngineError
from asyncrl.inference.engines.engine import ManagedEngine
from asyncrl.inference.engines.group import EngineGroup
from asyncrl.inference.gpus.shared_gpus import ENDED, SharedGpus
from asyncrl.inference.updates.sessions import on_each, resume
from asyncrl.inference.updates.weight_updates import WeightUpdates
from asyncrl.observability.waits import waiting

TAGS = ("kv_cache", "cuda_graph", "weights")
"""Memory that an engine releases by name; onload goes in the opposite order."""

_MOVABLE = frozenset({EngineState.SERVING, EngineState.PENDING_WEIGHTS, EngineState.OFFLOADED})
_UNSETTLED = frozenset({EngineState.STARTING, EngineState.UPDATING})


class Memory:
    """Moves engine memory by tag."""

    def __init__(
        self, group: EngineGroup, updates: WeightUpdates, gpus: SharedGpus, *, device: Device, config: Config
    ) -> None:
        self._group = group
        self._updates = updates
        self._gpus = gpus
        self._device = device
        self._lease_timeout_s = config.weights.lease_timeout_s
        self._settle_timeout_s = config.engine.start_timeout_s + config.weights.lease_timeout_s

    async def offload(self, tags: Sequence[str] | None) -> None:
        """Raises EngineError on CPU, for an unknown tag, and where a publication does not end."""
        wanted = self._checked(tags)
        given = self._gpus.give_up(wanted)  # from here on no engine begins to start or to load
        try:
            await self._settle()
            async with self._between_updates():
                given = frozenset()
                await self._release(wanted)
                await self._settle()  # one that was taken out of service meanwhile has its memory until it has ended
        finally:
            if given:
                self._gpus.take_back(given)
                self._updates.signal_end()

    async def onload(self, tags: Sequence[str] | None) -> None:
        """Raises EngineError as `offload` does."""
        wanted = self._checked(tags)

        async def take_back(engine: ManagedEngine) -> None:
            due = tuple(tag for tag in reversed(TAGS) if tag in wanted and tag in engine.offloaded)
            if not due:
                return
            await engine.client.resume_memory(due, self._updates.deadlines.move_s)
            engine.offloaded -= set(due)
            if not engine.offloaded:
                if engine.version is None:
                    await self._group.routing.remove(engine)
                await resume(engine, self._updates.deadlines)
            if not engine.offloaded and engine.state is EngineState.OFFLOADED:  # it lives
                engine.move(EngineState.SERVING if engine.version else EngineState.PENDING_WEIGHTS)

        async with self._between_updates():
            await self._on_each(self._engines({EngineState.OFFLOADED}), take_back, "did not take its memory back")
            self._gpus.take_back(wanted)
        self._updates.signal_end()  # engines without weights look for a copy again

    async def _release(self, wanted: frozenset[str]) -> None:
        due: dict[ManagedEngine, tuple[str, ...]] = {}
        running = [engine for engine in self._engines(_MOVABLE) if not engine.offloaded]
        for engine in self._engines(_MOVABLE):
            tags_due = tuple(tag for tag in TAGS if tag in wanted and tag not in engine.offloaded)
            if tags_due:
                due[engine] = tags_due
                engine.offloaded |= set(tags_due)
                if "weights" in tags_due:
                    engine.proved = engine.proved or engine.version is not None
                    engine.version = None
                if engine in running:
                    engine.move(EngineState.OFFLOADED, ", ".join(tags_due))

        async def release(engine: ManagedEngine) -> None:
            if engine in running:
                await engine.client.pause("retract", self._updates.deadlines.pause_s)
            await engine.client.release_memory(due[engine], self._updates.deadlines.move_s)

        await self._on_each(list(due), release, "did not release its memory")

    def _engines(self, states: Collection[EngineState]) -> list[ManagedEngine]:
        """Those on the trainer's GPUs in one of `states`."""
        return [engine for engine in self._group.engines if engine.endpoint.colocated and engine.state in states]

    async def _settle(self) -> None:
        """Waits for engines that start, take weights or are being killed; one that does not come to rest is killed."""

        def restless() -> list[ManagedEngine]:
            return self._engines(_UNSETTLED) + [engine for engine in self._engines(ENDED) if engine.has_process]

        try:
            with waiting("rest", "engines on the trainer's GPUs that start, load or end", self._settle_timeout_s):
                await self._group.wait_until(lambda: not restless())
        except TimeoutError as error:
            await self._quarantine(dict.fromkeys(restless(), str(error)))

    @asynccontextmanager
    async def _between_updates(self) -> AsyncIterator[None]:
        """No weights are published within."""
        while True:
            try:
                with waiting("end of the weight update", "the publisher", self._lease_timeout_s):
                    if self._updates.open_lease is not None:
                        await self._updates.next_end(self._updates.ends)
                    await self._updates.lock.acquire()
            except TimeoutError as error:
                raise EngineError(f"memory of engines was not moved: {error}") from error
            try:
                if self._updates.open_lease is None:
                    yield
                    return
            finally:
                self._updates.lock.release()

    async def _on_each(
        self, engines: Sequence[ManagedEngine], step: Callable[[ManagedEngine], Awaitable[None]], complaint: str
    ) -> None:
        """Takes `step` on all at once; those that fail, or are left halfway by a cancellation, are killed."""
        halfway = set(engines)
        failed: dict[str, str] = {}

        async def one(engine: ManagedEngine) -> None:
            await step(engine)
            halfway.discard(engine)

        try:
            failed = await on_each(engines, one)
        finally:
            with anyio.CancelScope(shield=True):  # kills have deadlines of their own
                await self._quarantine(
                    {engine: f"{complaint}: {failed.get(engine.engine_id, 'cancelled')}" for engine in halfway}
                )

    async def _quarantine(self, reasons: Mapping[ManagedEngine, str]) -> None:
        async with anyio.create_task_group() as task_group:
            for engine, reason in reasons.items():
                task_group.start_soon(self._group.quarantine, engine, reason)

    def _checked(self, tags: Sequence[str] | None) -> frozenset[str]:
        if self._device == "cpu":
            raise EngineError("engines on CPU cannot release memory: SGLang's memory endpoints need a GPU")
        unknown = sorted(set(tags or ()) - set(TAGS))
        if unknown:
            raise EngineError(f"unknown memory tags {unknown}; there are {', '.join(TAGS)}")
        return frozenset(TAGS if tags is None else tags)
