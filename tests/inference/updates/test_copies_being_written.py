"""Engines and evaluations that need a copy of the published weights while it is still being written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from safetensors.torch import save_file

from asyncrl.data.fleet import UpdateAck
from asyncrl.errors import EngineError
from asyncrl.inference.updates import state
from asyncrl.observability.waits import WAITS
from asyncrl.weights import copy_file
from tests.inference.conftest import StartFleet, cpu_layout, eventually
from tests.inference.test_models import beside
from tests.inference.transaction_rig import Rig, holds, rig, tensors_of
from tests.scripted import ScriptedEngine, ScriptedRouter

pytestmark = pytest.mark.anyio


class Disk:
    """Every write to a copy waits until the disk answers, and then fails where it is `full`."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.full = False


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk, write = Disk(), copy_file._write_all

    def hang(*arguments: Any) -> None:
        assert disk.answers.wait(60)
        if disk.full:
            raise OSError("No space left on device")
        write(*arguments)

    monkeypatch.setattr(copy_file, "_write_all", hang)
    yield disk
    disk.answers.set()


async def lose(it: Rig, *numbers: int) -> None:
    """Engines end; returns when each is back, without weights."""
    for number in numbers:
        await it.fleet.host.kill(f"engine-{number}")
    await eventually(lambda: all(it.fleet.states()[number] == "pending_weights" for number in numbers))


async def settled() -> None:
    """Whatever engines do about a copy now, they have begun."""
    await anyio.sleep(0.1)


async def test_an_engine_that_ends_between_the_commit_and_the_end_of_the_copy_waits_for_it(
    start_fleet: StartFleet, tmp_path: Path, disk: Disk
) -> None:
    async with rig(start_fleet, engines=2, restarts=3, copies=tmp_path / "copies") as it:
        await it.publish("0.0")
        await lose(it, 0)
        await settled()
        assert "update_weights_from_disk" not in it.fleet.engines[0].calls
        disk.answers.set()
        await eventually(lambda: it.serves(0, "0.0"))
        assert it.complaints() == [] and it.fleet.controller.statistics().updates_committed == 1


async def test_engines_that_all_ended_need_no_publication_while_a_copy_is_coming(
    start_fleet: StartFleet, tmp_path: Path, disk: Disk
) -> None:
    async with rig(start_fleet, engines=2, restarts=3, copies=tmp_path / "copies") as it:
        await it.publish("0.0")
        await lose(it, 0, 1)
        assert not it.fleet.controller.fleet().needs_publication
        assert any(str(tmp_path / "copies" / "0.0") in wait.subject for wait in WAITS.snapshot())
        disk.answers.set()
        await eventually(lambda: it.serves(0, "0.0") and it.serves(1, "0.0"))
        assert it.fleet.controller.statistics().updates_committed == 1


@pytest.mark.parametrize("how", ["the disk is full", "the disk hangs"])
async def test_engines_that_all_ended_need_a_publication_once_their_copy_has_failed(
    start_fleet: StartFleet, tmp_path: Path, disk: Disk, how: str
) -> None:
    async with rig(start_fleet, engines=2, restarts=5, copies=tmp_path / "copies") as it:
        if how == "the disk hangs":
            it.copy_timeout_s = 3.0
        await it.publish("0.0")
        await lose(it, 0, 1)
        if how == "the disk is full":
            disk.full = True
            disk.answers.set()
        with anyio.fail_after(20.0):
            await it.fleet.controller.wait_publication_needed()
        assert it.fleet.controller.copies_in_use() == frozenset()
        await it.publish("0.0")
        assert it.serves(0, "0.0") and it.serves(1, "0.0")
        assert not it.fleet.controller.fleet().needs_publication
        assert [engine.lives for engine in it.fleet.engines] == [2, 2]


async def test_an_engine_that_waits_for_a_copy_is_taken_along_by_the_next_publication(
    start_fleet: StartFleet, tmp_path: Path, disk: Disk
) -> None:
    async with rig(start_fleet, engines=2, restarts=3, copies=tmp_path / "copies") as it:
        await it.publish("0.0")
        await lose(it, 0)
        await it.publish("0.1")
        assert it.serves(0, "0.1") and it.serves(1, "0.1")
        await lose(it, 1)
        disk.answers.set()
        await eventually(lambda: it.serves(1, "0.1"))
        assert it.complaints() == []
        assert await it.copy() == tmp_path / "copies" / "0.1"
        assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == ["0.1"]


async def test_the_same_weights_published_again_while_their_copy_is_written_come_with_one(
    start_fleet: StartFleet, tmp_path: Path, disk: Disk
) -> None:
    async with rig(start_fleet, engines=1, restarts=3, copies=tmp_path / "copies") as it:
        await it.publish("0.0")
        await it.publish("0.0")
        disk.answers.set()
        copy = await it.copy()
        assert copy is not None and copy in it.fleet.controller.copies_in_use()
        await it.fleet.host.kill("engine-0")
        await eventually(lambda: it.fleet.engines[0].lives == 2 and it.serves(0, "0.0"))
        assert it.complaints() == []


def evaluating(tmp_path: Path, evaluator: ScriptedEngine) -> dict[str, Any]:
    """Settings of a rig with one engine that only evaluates."""
    return {
        "engines": 1,
        "copies": tmp_path / "copies",
        "servers": {"eval-0": evaluator, "router-eval": ScriptedRouter()},
        "layout": replace(cpu_layout(1), beside={"eval": beside("eval", 1)}),
        "eval": {"fleet": {"num_engines": 1}},
        "restarts": 3,
    }


async def test_an_evaluation_of_the_published_weights_waits_for_their_copy(
    start_fleet: StartFleet, tmp_path: Path, disk: Disk
) -> None:
    evaluator = ScriptedEngine(tensors_of("base"))
    async with rig(start_fleet, **evaluating(tmp_path, evaluator)) as it:
        await it.publish("0.0")
        versions: list[str] = []

        async def pin() -> None:
            versions.append((await it.fleet.controller.pin_eval_fleet()).version)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pin)
            disk_named = f"the disk of {tmp_path / 'copies' / '0.0'}"
            await eventually(
                lambda: ("copy of weights 0.0", disk_named) in {(w.what, w.subject) for w in WAITS.snapshot()}
            )
            assert not evaluator.alive
            disk.answers.set()
        assert versions == ["0.0"] and holds(evaluator, tensors_of("0.0"))


async def test_an_evaluation_that_waits_for_a_copy_takes_newer_weights_where_these_come_first(
    start_fleet: StartFleet, tmp_path: Path, disk: Disk
) -> None:
    evaluator = ScriptedEngine(tensors_of("base"))
    async with rig(start_fleet, **evaluating(tmp_path, evaluator)) as it:
        await it.publish("0.0")
        versions: list[str] = []

        async def pin() -> None:
            versions.append((await it.fleet.controller.pin_eval_fleet()).version)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pin)
            await anyio.wait_all_tasks_blocked()
            await it.publish("0.1")
            disk.answers.set()
        assert versions == ["0.1"] and holds(evaluator, tensors_of("0.1"))


@pytest.mark.parametrize("how", ["the disk is full", "the disk hangs"])
async def test_an_evaluation_whose_copy_fails_is_refused_and_the_next_one_is_not(
    start_fleet: StartFleet, tmp_path: Path, disk: Disk, how: str
) -> None:
    evaluator = ScriptedEngine(tensors_of("base"))
    async with rig(start_fleet, **evaluating(tmp_path, evaluator)) as it:
        it.copy_timeout_s = 0.3 if how == "the disk hangs" else 60.0
        await it.publish("0.0")
        if how == "the disk is full":
            disk.full = True
            disk.answers.set()
        with pytest.raises(EngineError, match="there is no copy of published weights"), anyio.fail_after(20.0):
            await it.fleet.controller.pin_eval_fleet()
        disk.full = False
        disk.answers.set()
        assert it.copies is not None
        copies = it.copies
        await eventually(lambda: not copies._disk.locked())
        it.copy_timeout_s = 60.0
        await it.publish("0.1")
        assert (await it.fleet.controller.pin_eval_fleet()).version == "0.1"
        assert holds(evaluator, tensors_of("0.1"))


async def test_an_evaluation_waits_for_no_publisher_that_breaks_its_word(
    start_fleet: StartFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "COPY_MARGIN_S", 0.1)
    evaluator = ScriptedEngine(tensors_of("base"))
    async with rig(start_fleet, **evaluating(tmp_path, evaluator)) as it:
        lease = await it.fleet.controller.begin_weight_update("0.0")
        for engine in it.fleet.engines:
            engine.weights.load(tensors_of("0.0").items())
        acks = [UpdateAck(engine.engine_id, engine.generation) for engine in lease.engines]
        due = anyio.current_time()
        await it.fleet.controller.commit_weight_update(lease.lease_id, acks, tmp_path / "never", copy_due=due)
        it.versions["0.0"] = tensors_of("0.0")
        with pytest.raises(EngineError, match=r"no copy of weights 0\.0 from the disk of"), anyio.fail_after(20.0):
            await it.fleet.controller.pin_eval_fleet()


async def test_an_evaluation_whose_copy_newer_weights_overtake_evaluates_those(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    """The copy is given up with the first tensor of the next publication, when nothing is committed yet."""
    evaluator = ScriptedEngine(tensors_of("base"))
    async with rig(start_fleet, **evaluating(tmp_path, evaluator)) as it:
        controller, versions = it.fleet.controller, list[str]()

        async def update(version: str, *, overtake: Path | None = None) -> Path:
            (directory := tmp_path / version).mkdir()
            save_file(tensors_of(version), directory / "model.safetensors")
            lease = await controller.begin_weight_update(version)
            if overtake is not None:
                controller.copy_written(overtake, False)
                tasks.start_soon(pin)
                await anyio.wait_all_tasks_blocked()
                assert versions == []
            for engine in it.fleet.engines:
                engine.weights.load(tensors_of(version).items())
            it.versions[version] = tensors_of(version)
            acks = [UpdateAck(engine.engine_id, engine.generation) for engine in lease.engines]
            due = anyio.current_time() + 60
            await controller.commit_weight_update(lease.lease_id, acks, directory, copy_due=due)
            return directory

        async def pin() -> None:
            versions.append((await controller.pin_eval_fleet()).version)

        async with anyio.create_task_group() as tasks:
            first = await update("0.0")
            controller.copy_written(await update("0.1", overtake=first), True)
        assert versions == ["0.1"] and holds(evaluator, tensors_of("0.1"))
