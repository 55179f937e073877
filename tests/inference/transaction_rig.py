"""A publication with everything real but the engines: controller, transports, trainer thread, gloo group.

`Rig.complaints` says what is not as it must be between publications, asked of the engines and not of the controller.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

from asyncrl.data.fleet import ACTOR, EngineState
from asyncrl.errors import TrainerError, WeightUpdateError
from asyncrl.inference.controller import InferenceController
from asyncrl.inference.routing import router_client as router_client
from asyncrl.inference.routing import routing
from asyncrl.inference.sglang import engine_api
from asyncrl.inference.updates import deadlines
from asyncrl.observability.waits import waiting
from asyncrl.run.pauses import Pauses, ToldFleet
from asyncrl.tasks import Background
from asyncrl.weights.copies import Copies
from asyncrl.weights.publication import PublicationLimits, PublicationReport
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.transfer import Transport
from asyncrl.weights.transports import broadcast
from asyncrl.weights.transports.broadcast import BroadcastTransport
from asyncrl.weights.transports.disk import DiskTransport
from asyncrl.weights.transports.tensor import TensorTransport
from tests.inference.conftest import Fleet, StartFleet, eventually
from tests.scripted import Fault, Latency, ScriptedEngine, die, freeze, instead, refuse
from tests.scripted.faults import FaultBook
from tests.scripted.server import ScriptedServer
from tests.weights.fakes import ThreadSource

CALL_S = 2.0
"""Longest control call to who hangs; measured under 10 ms, and 0.7 s on two cores that were both overbooked."""
TRANSFER_S = 1.0
"""Timeout of the transports where waits are in vain on purpose, and end after it."""
TRANSFERS = 3
"""Tried there: a machine that stands still for a moment ends one. Elsewhere the second must be the last."""
PATIENT_S = 5.0
"""Timeout of the transports where no wait is meant to be in vain."""
HEALTHY_S = 10.0
"""For what engines do that nothing ails."""
BUCKET_BYTES = 3 * 1024
BOUND_S = 20.0
"""For the publication that is hit: its transfers and a take-back, each with its waits in a row."""

_patience: tuple[float, int] = PATIENT_S, 2
"""Timeout of the transports, and how many transfers are tried."""
_books: dict[str, FaultBook] = {}
"""Of the engines and the router, by name, of the rig that was made last."""


def shorten_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which engine-1, the router or the trainer hangs.

    Deadlines of control calls are cut; those that follow from the transport's own timeout are not. They are long for
    who is not concerned, now or at all: it must not be convicted because the machine stood still.
    """

    def impatient(what: str, subject: str, timeout_s: float) -> AbstractContextManager[None]:
        endpoint = "add_worker" if subject == "router" else what
        if subject in _books and not _books[subject].concern(endpoint):
            return waiting(what, subject, max(timeout_s, HEALTHY_S))
        return waiting(what, subject, CALL_S if timeout_s >= 10.0 else timeout_s)

    monkeypatch.setattr(engine_api, "waiting", impatient)
    monkeypatch.setattr(router_client, "waiting", impatient)
    monkeypatch.setattr(f"{__name__}._patience", (TRANSFER_S, TRANSFERS))
    monkeypatch.setattr(broadcast, "ANSWER_GRACE_S", 1.5)  # also that of engine-0


def set_deadlines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short where a parameter says that something hangs: elsewhere they would convict a machine that stood still."""
    monkeypatch.setattr(deadlines, "TAKE_BACK_S", HEALTHY_S)
    monkeypatch.setattr(routing, "REMOVE_TIMEOUT_S", HEALTHY_S)
    monkeypatch.setattr(routing, "ANSWER_TIMEOUT_S", HEALTHY_S)
    callspec = getattr(request.node, "callspec", None)
    params = [] if callspec is None else [*callspec.params.values()]
    if "join" in params:  # of the trainer: engines wait for it in vain, and none is convicted
        monkeypatch.setattr(broadcast, "ANSWER_GRACE_S", 0.5)
    if "hangs" in params:
        shorten_deadlines(monkeypatch)


@functools.cache
def tensors_of(version: str) -> dict[str, Tensor]:
    """Three buckets: six small tensors, and in the middle one that is larger than a bucket and travels as it is."""
    generator = torch.Generator().manual_seed(zlib.crc32(version.encode()))
    shapes = {f"layer.{i}": (16, 16) for i in range(3)} | {"big": (32, 40)} | {f"layer.{i}": (256,) for i in (3, 4, 5)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@dataclass
class Rig:
    fleet: Fleet
    source: ThreadSource
    transport: Transport
    copies: Copies | None
    transfers: int
    versions: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    pauses: Pauses = field(default_factory=Pauses)
    """Tells executors of the updates, where there are some."""
    copy_timeout_s: float = 600.0

    async def publish(self, version: str) -> PublicationReport:
        self.source.tensors = self.versions[version] = tensors_of(version)
        fleet = ToldFleet(self.fleet.controller, self.pauses)
        limits = PublicationLimits(
            transfers=self.transfers,
            turn_timeout_s=BOUND_S,
            begin_timeout_s=BOUND_S,
            abandon_timeout_s=HEALTHY_S,
            cleanup_timeout_s=HEALTHY_S,
            copy_timeout_s=self.copy_timeout_s,
        )
        publisher = Publisher(
            fleet, self.source, self.transport, events=self.fleet.events, copies=self.copies, limits=limits
        )
        return await publisher.publish(version)

    async def copy(self) -> Path | None:
        """Waits until the copy of the published weights is written; returns where it is, or None."""
        state = self.fleet.controller._started.state
        await state.wait_copy()
        assert state.published is not None
        return state.published.directory

    def complaints(self) -> list[str]:
        """What is not as it must be between publications."""
        found: list[str] = []
        view = self.fleet.controller.fleet()
        trained = [status for status in view.engines if status.model == ACTOR]
        for status, engine in zip(trained, self.fleet.engines, strict=True):
            who, serves = status.endpoint.engine_id, status.state is EngineState.SERVING
            routed = status.endpoint.url in self.fleet.router.workers
            if not engine.alive:
                found += [f"{who} is dead and serves"] if serves else []
                found += [f"{who} is dead and routed"] if routed else []
                continue
            found += [f"{who} is paused"] if engine.paused else []
            found += [f"{who} has an open session"] if engine.session else []
            if serves or routed:
                expected = self.versions.get(view.published_version or "", {})
                if engine.version != view.published_version:
                    found.append(f"{who} serves {engine.version} and not {view.published_version}")
                if not holds(engine, expected):
                    found.append(f"{who} serves as {engine.version} what was not published as that")
            if serves and not routed:
                found.append(f"{who} serves and is not routed")
        return found

    def serves(self, number: int, version: str) -> bool:
        engine = self.fleet.engines[number]
        return engine.alive and engine.version == version and engine.url in self.fleet.router.workers


def holds(engine: ScriptedEngine, tensors: dict[str, Tensor]) -> bool:
    held = engine.weights.tensors
    return held.keys() == tensors.keys() and all(torch.equal(held[name], t) for name, t in tensors.items())


@asynccontextmanager
async def rig(
    start_fleet: StartFleet,
    *,
    engines: int = 2,
    disk: Path | None = None,
    handover: bool = False,
    nccl: bool = False,
    copies: Path | None = None,
    restarts: int = 0,
    latency: Latency | None = None,
    slots: int = 128,
    vocab_size: int = 1 << 20,
    on_update: str = "retract",
    servers: Mapping[str, ScriptedServer] | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """A fleet that has booted. `disk`: directory of the disk transport. `handover`: same-host tensor handover. `nccl`:
    broadcast over what `over_fake_nccl` has put in its place.

    `copies`: where copies of the weights are kept. `servers`: what is started under names beside those of the fleet.
    """

    def prepare(fleet: Fleet) -> None:
        fleet.host.servers |= servers or {}
        for engine in fleet.engines:
            engine.latency, engine.slots, engine.vocab_size = latency or engine.latency, slots, vocab_size
        _books.clear()
        _books.update((f"engine-{number}", engine.faults) for number, engine in enumerate(fleet.engines))
        _books["router"] = fleet.router.faults

    source = ThreadSource(tensors_of("base"))
    transfer_s, transfers = _patience
    options: dict[str, Any] = {
        "bucket_bytes": BUCKET_BYTES,
        "timeout_s": transfer_s,
        "flush_cache": on_update != "in_place",
    }

    def transport_to(controller: InferenceController) -> Transport:
        if disk is not None:
            return DiskTransport(controller.open_engine, directory=disk, **options)
        if handover:
            return TensorTransport(controller.open_engine, **options)
        return BroadcastTransport(controller.open_engine, backend="nccl" if nccl else "gloo", **options)

    try:
        async with start_fleet(
            engines,
            tensors=tensors_of("base"),
            prepare=prepare,
            restarts=restarts,
            weights={"verify": "always", "on_update": on_update},
            **settings,
        ) as fleet:
            await fleet.controller.wait_ready()
            transport = transport_to(fleet.controller)
            async with anyio.create_task_group() as writing:
                kept = None if copies is None else Copies(copies, Background(writing))
                yield Rig(fleet, source, transport, kept, transfers)
                with anyio.CancelScope(shield=True):
                    await transport.aclose()
                    if kept is not None:
                        await kept.aclose()
        assert fleet.failures == []
    finally:
        source.close()


# what goes wrong, and what must be so after it

ENGINE_FAULTS: dict[str, Callable[..., Fault]] = {
    "dies": die,
    "hangs": freeze,
    "answers 400": functools.partial(refuse, status=400),
    "answers 500": functools.partial(refuse, status=500),
}
"""All of engine-1. A hang is that of a scheduler: the HTTP server lives and keeps the locks that the call took."""


async def check_after(rig: Rig, version: str) -> None:
    """Nothing is left of the publication that was hit, and the next one succeeds."""
    # One that ended by itself is taken from the router by its keeper, beside the publication.
    await eventually(lambda: not any(complaint.endswith("dead and routed") for complaint in rig.complaints()))
    assert rig.complaints() == []
    assert rig.fleet.controller.statistics().open_lease is None
    for engine in rig.fleet.engines:
        engine.faults.clear()
    rig.fleet.router.faults.clear()
    rig.source.before_tensor = rig.source.before_call = None
    with anyio.fail_after(BOUND_S):
        report = await rig.publish(version)
    assert rig.complaints() == []
    assert report.engines
    assert all(rig.serves(int(engine_id[-1]), version) for engine_id in report.engines)


async def fail_one_engine(rig: Rig, version: str, fault: Fault) -> None:
    """Publishes `version` while engine-1 fails; engine-0 must not notice."""
    rig.fleet.engines[1].script(fault)
    with anyio.fail_after(BOUND_S):
        await rig.publish(version)
    assert rig.fleet.engines[1].faults.happened, "the step was never reached"
    assert rig.serves(0, version)
    await check_after(rig, version + " again")


async def cancel_at(rig: Rig, version: str, endpoint: str, nth: int = 1, server: ScriptedServer | None = None) -> None:
    """Cancels the publishing task as engine-1 (or `server`) begins to answer."""
    scope = anyio.CancelScope()

    async def cancel() -> None:
        scope.cancel()

    (server or rig.fleet.engines[1]).faults.add(instead(endpoint, cancel, nth=nth))
    with anyio.fail_after(BOUND_S), scope:
        await rig.publish(version)
    assert scope.cancelled_caught
    await check_after(rig, version + " again")


async def fail_trainer(rig: Rig, version: str, step: str | int, how: str = "raises") -> None:
    """The trainer raises (or the publication is cancelled) at a step: a call by its name, or the nth exported tensor.

    The number after that of the last tensor is the end of the export.
    """
    scope, loop, reached = anyio.CancelScope(), asyncio.get_running_loop(), threading.Event()

    def fail(at: str | int) -> None:
        if at != step or reached.is_set():
            return
        reached.set()
        if how == "raises":
            raise TrainerError("trainer rank 1: out of memory")
        loop.call_soon_threadsafe(scope.cancel)

    rig.source.before_tensor = rig.source.before_call = fail
    raised: Exception | None = None
    with anyio.fail_after(BOUND_S), scope:
        try:
            await rig.publish(version)
        except (TrainerError, WeightUpdateError) as error:
            raised = error
    assert reached.is_set(), "the step was never reached"
    assert scope.cancelled_caught if how == "cancelled" else "out of memory" in str(raised)
    await check_after(rig, version + " again")
