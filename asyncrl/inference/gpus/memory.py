"""Offload and onload of engines that share GPUs with the trainer.

Invariants
- An engine is paused before its first memory is released and goes on after its last memory is back; requests wait in
  it meanwhile.
- After `offload` no engine holds memory of the given tags: an engine that refuses, hangs or was left halfway by a
  cancellation is killed, as is one that fails to take its memory back. It is started again in the engines' turn
  (`shared_gpus.py`).
- Released weights are gone (the engine keeps no copy of them in host memory): an engine that has taken that memory back
  holds no version, and serves only after a publication or with a kept copy.
- Memory moves neither while weights are published nor while an engine starts or loads weights; both are waited for.
- An `offload` that ends before any engine was asked for memory leaves the turn with the engines.
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
from asyncrl.inference.engines.engine import ManagedEngine, on_each
from asyncrl.inference.engines.group import EngineGroup
from asyncrl.inference.gpus.shared_gpus import ENDED, SharedGpus
from asyncrl.inference.updates.sessions import resume
from asyncrl.inference.updates.state import UpdateState
from asyncrl.observability.waits import waiting

TAGS = ("kv_cache", "cuda_graph", "weights")
"""Parts of an engine's memory that it releases by name; onload goes in the opposite order."""

_MOVABLE = frozenset({EngineState.SERVING, EngineState.PENDING_WEIGHTS, EngineState.OFFLOADED})
_UNSETTLED = frozenset({EngineState.STARTING, EngineState.UPDATING})


class Memory:
    """Moves memory of a group's engines by tag."""

    def __init__(
        self, group: EngineGroup, state: UpdateState, gpus: SharedGpus, *, device: Device, config: Config
    ) -> None:
        """`state` says whether weights are being published to the group."""
        self._group = group
        self._state = state
        self._gpus = gpus
        self._device = device
        self._lease_timeout_s = config.weights.lease_timeout_s
        self._settle_timeout_s = config.engine.start_timeout_s + config.weights.lease_timeout_s

    async def offload(self, tags: Sequence[str] | None) -> None:
        """Has engines release memory of `tags` (None: all of `TAGS`), and begins the trainer's turn.

        Raises EngineError on CPU, for an unknown tag, and when a publication does not end.
        """
        wanted = self._checked(tags)
        given = self._gpus.give_up(wanted)  # from here on no engine begins to start or to load
        try:
            await self._settle()
            async with self._between_updates():
                given = frozenset()
                await self._release(wanted)
                await self._settle()  # an engine that was taken out of service has its memory until it has ended
        finally:
            if given:
                self._gpus.take_back(given)
                self._state.signal_end()

    async def onload(self, tags: Sequence[str] | None) -> None:
        """Has engines take memory of `tags` (None: all of `TAGS`) back; with the last of it their turn begins.

        Raises EngineError as `offload` does.
        """
        wanted = self._checked(tags)

        async def take_back(engine: ManagedEngine) -> None:
            due = tuple(tag for tag in reversed(TAGS) if tag in wanted and tag in engine.offloaded)
            if not due:
                return
            await engine.client.resume_memory(due, self._group.deadlines.move_s)
            engine.offloaded -= set(due)
            if not engine.offloaded:
                if engine.version is None:
                    await self._group.routing.remove(engine)
                await resume(engine, self._group.deadlines)
            if not engine.offloaded and engine.state is EngineState.OFFLOADED:  # it lives
                engine.move(EngineState.SERVING if engine.version else EngineState.PENDING_WEIGHTS)

        async with self._between_updates():
            await self._on_each(self._engines({EngineState.OFFLOADED}), take_back, "did not take its memory back")
            self._gpus.take_back(wanted)
        self._state.signal_end()  # engines without weights look for a copy again

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
                await engine.client.pause("retract", self._group.deadlines.pause_s)
            await engine.client.release_memory(due[engine], self._group.deadlines.move_s)

        await self._on_each(list(due), release, "did not release its memory")

    def _engines(self, states: Collection[EngineState]) -> list[ManagedEngine]:
        """Engines on the trainer's GPUs in one of `states`."""
        return [engine for engine in self._group.engines if engine.endpoint.colocated and engine.state in states]

    async def _settle(self) -> None:
        """Waits for engines that start, take weights or are being killed; kills those that take too long."""

        def restless() -> list[ManagedEngine]:
            return self._engines(_UNSETTLED) + [engine for engine in self._engines(ENDED) if engine.has_process]

        try:
            with waiting("rest", "engines on the trainer's GPUs that start, load or end", self._settle_timeout_s):
                await self._group.wait_until(lambda: not restless())
        except TimeoutError as error:
            await self._quarantine(dict.fromkeys(restless(), str(error)))

    @asynccontextmanager
    async def _between_updates(self) -> AsyncIterator[None]:
        """No weights are published while the body runs."""
        while True:
            try:
                with waiting("end of the weight update", "the publisher", self._lease_timeout_s):
                    if self._state.open_lease is not None:
                        await self._state.next_end(self._state.ends)
                    await self._state.lock.acquire()
            except TimeoutError as error:
                raise EngineError(f"memory of engines was not moved: {error}") from error
            try:
                if self._state.open_lease is None:
                    yield
                    return
            finally:
                self._state.lock.release()

    async def _on_each(
        self, engines: Sequence[ManagedEngine], step: Callable[[ManagedEngine], Awaitable[None]], complaint: str
    ) -> None:
        """Takes `step` on all at once; kills engines that fail, or that a cancellation leaves halfway."""
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
                task_group.start_soon(engine.quarantine, reason)

    def _checked(self, tags: Sequence[str] | None) -> frozenset[str]:
        if self._device == "cpu":
            raise EngineError("engines on CPU cannot release memory: SGLang's memory endpoints need a GPU")
        unknown = sorted(set(tags or ()) - set(TAGS))
        if unknown:
            raise EngineError(f"unknown memory tags {unknown}; there are {', '.join(TAGS)}")
        return frozenset(TAGS if tags is None else tags)
