from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
from torch import Tensor

from asyncrl.config import Config
from asyncrl.config.layout import EnginePlacement, ProcessLayout, TrainerPlacement
from asyncrl.inference.controller import InferenceController
from asyncrl.observability.events import EventLog
from tests.scripted import Fault, ScriptedEngine, ScriptedHost, ScriptedRouter, instead

_SOME_TOKENS = 15
"""Of a request that stands in the middle."""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@dataclass
class Fleet:
    """A controller over scripted engines."""

    controller: InferenceController
    host: ScriptedHost
    router: ScriptedRouter
    engines: list[ScriptedEngine]
    events: EventLog
    failures: list[BaseException]

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events.recent]

    def states(self) -> list[str]:
        return [status.state.value for status in self.controller.fleet().engines]


async def eventually(satisfied: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Waits for something that no event tells; the limit is for a machine that does much else, speed is no subject."""
    with anyio.fail_after(timeout_s):
        while True:
            if satisfied():
                return
            await anyio.sleep(0.01)


@asynccontextmanager
async def in_the_middle(
    engines: Sequence[ScriptedEngine], asked: Callable[[], int]
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Requests of these engines stand still with some tokens while the block lasts.

    Call what it yields to wait until all that are `asked` have come, and those that run stand.
    """

    def stand() -> bool:
        running = [engine.generation.running for engine in engines]
        standing = [engine.generation.braked for engine in engines]
        known = sum(engine.generation.running + engine.generation.waiting for engine in engines)
        return known >= asked() and running == standing and sum(standing) > 0

    for engine in engines:
        engine.generation.brake(_SOME_TOKENS)
    try:
        yield lambda: eventually(stand)
    finally:
        for engine in engines:
            engine.generation.brake(None)


def cancelled_in(scope: anyio.CancelScope, endpoint: str, callers: int = 1, **more: Any) -> Fault:
    """A call that gets no answer; `scope` is cancelled as soon as `callers` wait for one, of one server or several."""
    waiting = 0

    async def cancel() -> None:
        nonlocal waiting
        waiting += 1
        if waiting == callers:
            scope.cancel()
        await anyio.sleep_forever()

    return instead(endpoint, cancel, **more)


async def dispose_within(fleet: Fleet, seconds: float) -> None:
    """Disposal cannot be cancelled, so it is timed."""
    began = anyio.current_time()
    await fleet.controller.dispose()
    assert anyio.current_time() - began < seconds


StartFleet = Callable[..., AbstractAsyncContextManager[Fleet]]


def cpu_layout(engines: int) -> ProcessLayout:
    return ProcessLayout(
        device="cpu",
        dtype="float32",
        trainers=(TrainerPlacement(rank=0, node=0, local_rank=0, gpu=None),),
        tensor_parallel=1,
        engines=tuple(
            EnginePlacement(
                engine_id=f"engine-{i}",
                node=0,
                tensor_parallel=1,
                gpus=(),
                visible_devices="",
                transport="broadcast",
            )
            for i in range(engines)
        ),
        unused_gpus=(),
    )


def colocated_layout(engines: int) -> ProcessLayout:
    layout = cpu_layout(engines)
    shared = tuple(replace(placement, trainer_ranks=(0,), gpus=(0,)) for placement in layout.engines)
    return replace(layout, device="cuda", engines=shared)


@asynccontextmanager
async def fleet_of(
    directory: Path,
    engines: int = 1,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    prepare: Callable[[Fleet], None] | None = None,
    restarts: int = 0,
    colocated: bool = False,
    layout: ProcessLayout | None = None,
    **config: dict[str, Any],
) -> AsyncIterator[Fleet]:
    """A controller over `engines` scripted engines; what it raises into its task group lands in `failures`.

    `restarts`: how often a process that ended is started again. `colocated`: on the trainer's GPUs.
    """
    (directory / "model.safetensors").touch()  # a model of no size: deadlines are at their least
    if not (directory / "config.json").exists():
        (directory / "config.json").write_text('{"head_dim": 128}')
    device: Literal["cpu", "cuda"] = "cuda" if colocated else "cpu"
    placed = layout or (colocated_layout(engines) if colocated else cpu_layout(engines))
    sizes = [placement.tensor_parallel for placement in placed.engines] + [1] * engines
    scripts = [ScriptedEngine(tensors, device=device, tensor_parallel=size) for size in sizes[:engines]]
    router = ScriptedRouter()
    host = ScriptedHost({f"engine-{i}": script for i, script in enumerate(scripts)}, router)
    events = EventLog(None)
    controller = InferenceController(
        Config.model_validate(config | {"engine": {"max_restarts": restarts} | config.get("engine", {})}),
        hosts={0: host},
        events=events,
        layout=placed,
        model_path=directory,
        run_dir=directory,
    )
    fleet = Fleet(controller, host, router, scripts, events, [])
    if prepare is not None:
        prepare(fleet)

    async def run(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        try:
            async with anyio.create_task_group() as task_group:
                await controller.start(task_group)
                task_status.started()
        except BaseExceptionGroup as group:
            fleet.failures += group.exceptions

    async with host, anyio.create_task_group() as outer:
        await outer.start(run)
        try:
            yield fleet
        finally:
            await controller.dispose()


@pytest.fixture
def start_fleet(tmp_path: Path) -> StartFleet:
    """See `fleet_of`."""
    return partial(fleet_of, tmp_path)
