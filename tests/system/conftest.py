"""One real fleet for the whole session: host, engine, router and controller on a tiny random model.

An engine costs 25 to 60 CPU seconds to start, so all system tests share it. They run in one event loop (the backend
fixture has session scope, so anyio keeps its runner), one after the other. A test leaves the fleet serving:
`serving_fleet` sees to it, and looks for what stayed paused. Whole jobs whose subject is not the start or the end of an
engine take that of the fleet as an external one (`shared_engine`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import pytest

from asyncrl.config import Config
from asyncrl.config.layout import ProcessLayout
from asyncrl.config.machine import Machine
from asyncrl.config.placement.rules import plan_layout
from asyncrl.data.fleet import EngineState, UpdateAck
from asyncrl.host import EngineHost
from asyncrl.host.proc import descendants
from asyncrl.host.shared_memory import mapped_by
from asyncrl.inference import building
from asyncrl.inference.controller import InferenceController
from asyncrl.inference.sglang.engine_api import Checksums, EngineApi
from asyncrl.observability.events import EventLog
from asyncrl.run_directory.engine_key import key_file, make_key
from tests.tiny_model import write_tiny_qwen3


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@dataclass
class RealFleet:
    """The shared fleet and what it was made from."""

    config: Config
    layout: ProcessLayout
    host: EngineHost
    controller: InferenceController
    events: EventLog
    run_dir: Path
    models: tuple[Path, Path]
    """Two checkpoints of the same shape; engines are started on the first."""
    failures: list[BaseException] = field(default_factory=list)
    """What the controller raised into its task group."""
    publications: int = 0
    loaded: Mapping[str, Checksums] = field(default_factory=dict)
    """By engine: checksums of the first checkpoint as the engine itself loaded it when it started."""

    def next_version(self) -> str:
        self.publications += 1
        return f"0.{self.publications - 1}"

    async def publish_from_disk(self, model: Path, version: str | None = None, *, keep_copy: bool = True) -> str:
        """One whole transaction with the simplest transport; returns the version.

        The checkpoint serves as its copy: an engine that loses its weights takes them from there by itself.
        """
        version = version or self.next_version()
        lease = await self.controller.begin_weight_update(version)
        for engine in lease.engines:
            async with EngineApi.open(engine.engine_id, engine.url) as client:
                await client.update_from_disk(str(model))
        acks = [UpdateAck(engine.engine_id, engine.generation) for engine in lease.engines]
        await self.controller.commit_weight_update(lease.lease_id, acks, model if keep_copy else None)
        return version


def fleet_config(model: Path, run_dir: Path, *, health: Mapping[str, Any] | None = None, **engine: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": model},
            "run": {"dir": run_dir},
            "engine": {"max_total_tokens": 16384, "max_running_requests": 64, **engine},
            "health": health or {},
        }
    )


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("models")
    return write_tiny_qwen3(base / "first", seed=1), write_tiny_qwen3(base / "second", seed=2)


@asynccontextmanager
async def started_fleet(
    models: tuple[Path, Path], run_dir: Path, *, health: Mapping[str, Any] | None = None, **engine: Any
) -> AsyncIterator[RealFleet]:
    """A fleet of its own, ready, with settings of the sections `health` and `engine`; its end leaves no file.

    Its engines have no key: tests speak to them as they are, and whole jobs take them as external ones.
    """
    async with private_fleet(models, run_dir, health=health, make_key=without_key, **engine) as fleet:
        yield fleet


def without_key(run_dir: Path) -> None:
    key_file(run_dir).write_text("{}\n")


@asynccontextmanager
async def private_fleet(
    models: tuple[Path, Path],
    run_dir: Path,
    *,
    health: Mapping[str, Any] | None = None,
    make_key: Callable[[Path], str | None] = make_key,
    **engine: Any,
) -> AsyncIterator[RealFleet]:
    """The same as a job starts it: its engines have the job's key."""
    config = fleet_config(models[0], run_dir, health=health, **engine)
    layout = plan_layout(config, Machine())
    events = EventLog(run_dir / "events.jsonl")

    async with EngineHost.start(run_dir / "logs") as host:
        controller = InferenceController(
            config, hosts={0: host}, events=events, layout=layout, model_path=models[0], run_dir=run_dir
        )
        shared = RealFleet(config, layout, host, controller, events, run_dir, models)

        async def run(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            # In a task of its own, so that a failing fleet fails tests by its error and cancels nothing of pytest's.
            try:
                async with anyio.create_task_group() as task_group:
                    await controller.start(task_group)
                    task_status.started()
            except BaseExceptionGroup as group:
                shared.failures.extend(group.exceptions)

        async with anyio.create_task_group() as outer:
            with mock.patch.object(building, "make_key", make_key):
                await outer.start(run)
            try:
                await controller.wait_ready()
                shared.loaded = await controller.check_weights("checksum")
                yield shared
            finally:
                files = [Path("/dev/shm") / name for name in mapped_by(descendants(host.pid))]
                await controller.dispose()
    events.close()
    assert files, "the engine's shared memory was not found, so its end cannot be seen"
    assert [path for path in files if path.exists()] == []
    assert not (run_dir / "tmp").exists()


@pytest.fixture(scope="session")
async def fleet(
    anyio_backend: object, tiny_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RealFleet]:
    """Started and ready; it may or may not hold published weights yet."""
    async with started_fleet(tiny_models, tmp_path_factory.mktemp("run")) as fleet:
        yield fleet


@pytest.fixture
async def serving_fleet(fleet: RealFleet) -> AsyncIterator[RealFleet]:
    """The shared fleet with published weights of the first model; afterwards nothing may be paused or failed."""
    await fleet.publish_from_disk(fleet.models[0])
    yield fleet
    assert fleet.failures == []
    for status in fleet.controller.fleet().engines:
        assert status.state is EngineState.SERVING
        async with EngineApi.open(status.endpoint.engine_id, status.endpoint.url) as client:
            await client.generate([5], timeout_s=10)


@pytest.fixture
async def shared_engine(serving_fleet: RealFleet) -> AsyncIterator[str]:
    """Url of the shared fleet's engine, which holds the first model, for a whole job that takes it as an external one.

    The fleet's own loop stands still while such a test, which is synchronous, runs. However the job ends, it leaves the
    engine idle and unpaused, and the next test publishes other weights to it.
    """
    [status] = serving_fleet.controller.fleet().engines
    yield status.endpoint.url
    async with EngineApi.open(status.endpoint.engine_id, status.endpoint.url) as client:
        await client.flush_cache(idle_timeout_s=20)  # refused while it has a request; the last ones end in a moment
