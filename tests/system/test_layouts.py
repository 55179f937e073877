"""Trainers of every layout publish to the real engine, which then holds what they export, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.fleet import EngineEndpoint
from asyncrl.inference.sglang.engine_api import EngineApi
from asyncrl.observability.events import EventLog
from asyncrl.training.backends import make_backend
from asyncrl.training.train_group import Publishing, TrainGroup
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.transfer import WeightSource
from asyncrl.weights.transports.broadcast import BroadcastTransport
from tests.training.batches import make_batch
from tests.training.worlds import Scenario, run_world
from tests.weights.fakes import AccountingFleet

pytestmark = [pytest.mark.system, pytest.mark.timeout(450)]

BUCKET = 32 * 1024


def publishing_to(url: str) -> Publishing:
    async def begin() -> None:
        async with EngineApi.open("engine-0", url) as engine:
            await engine.pause()
            await engine.begin_weight_update()

    async def commit() -> None:
        async with EngineApi.open("engine-0", url) as engine:
            await engine.end_weight_update()
            await engine.resume()

    def publisher(source: WeightSource) -> Publisher:
        transport = BroadcastTransport(EngineApi.open, backend="gloo", bucket_bytes=BUCKET, timeout_s=30.0)
        fleet = AccountingFleet((EngineEndpoint("engine-0", 1, url, 1),), hooks={"begin": begin, "commit": commit})
        return Publisher(fleet, source, transport, events=EventLog(None, attempt=0))

    return Publishing(publisher, version_of=lambda step: f"0.{step}")


def train_and_publish(url: str, export: Path) -> Scenario:
    """What the engine holds at first, after the publication, and after it has loaded the export."""

    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        async with EngineApi.open("engine-0", url) as engine:
            held = [await engine.check_weights("checksum")]
            await group.init()
            await group.train(0, make_batch([(5, 9), (3, 30), (17, 2), (1, 12)], vocab_size=64))
            await group.update_weights(0)
            held.append(await engine.check_weights("checksum"))
            await group.export_hf(export)
            await engine.update_from_disk(str(export))
            return [*held, await engine.check_weights("checksum")]

    return scenario


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(2, 1), (2, 2), (4, 2)], ids=["DP 2", "TP 2", "TP 2 and DP 2"])
def test_an_engine_holds_what_a_trainer_of_any_layout_exports_to_the_last_bit(
    shared_engine: str, tiny_models: tuple[Path, Path], tmp_path: Path, ranks: int, tensor_parallel: int
) -> None:
    world = run_world(
        train_and_publish(shared_engine, tmp_path / "export"),
        world_size=ranks,
        make_backend=make_backend,
        config={
            "model": {"path": tiny_models[0]},
            "run": {"dir": tmp_path / "run"},
            "train": {"tensor_parallel": tensor_parallel, "lr": 1e-3},
        },
        publishing=publishing_to(shared_engine),
    )
    before, published, loaded = world.value
    assert published == loaded != before
    assert world.exit_codes == (0,) * ranks
