"""Copies of published weights while somebody reads them, or may have to once more; and where they are gone."""

from __future__ import annotations

import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from safetensors.torch import save_file

from asyncrl.errors import WeightUpdateError
from asyncrl.inference.updates import copies_in_use
from tests.inference.conftest import StartFleet, cpu_layout, eventually
from tests.inference.test_models import beside
from tests.inference.transaction_rig import holds, rig, tensors_of
from tests.scripted import ScriptedEngine, ScriptedRouter, instead, refuse

pytestmark = pytest.mark.anyio

KEPT = pytest.mark.parametrize("kept", ["disk", "copies"])


def by(kept: str, tmp_path: Path) -> dict[str, Any]:
    """What keeps weights in the directory of that name: the transport, or copies beside it."""
    return {"disk": tmp_path / kept} if kept == "disk" else {"copies": tmp_path / kept}


@KEPT
async def test_an_engine_that_evaluates_reads_what_it_was_pinned_to_however_many_publications_later(
    start_fleet: StartFleet, tmp_path: Path, kept: str
) -> None:
    evaluator, router = ScriptedEngine(tensors_of("base")), ScriptedRouter()
    settings: dict[str, Any] = {
        **by(kept, tmp_path),
        "servers": {"eval-0": evaluator, "router-eval": router},
        "layout": replace(cpu_layout(1), beside={"eval": beside("eval", 1)}),
        "eval": {"fleet": {"num_engines": 1}},
        "restarts": 3,
    }
    async with rig(start_fleet, engines=1, **settings) as it:
        await it.publish("0.0")
        info = await it.fleet.controller.pin_eval_fleet()
        assert info.version == "0.0"
        for step in range(1, 6):
            await it.publish(f"0.{step}")
        await it.copy()
        await it.fleet.host.signal("eval-0", signal.SIGKILL)
        await eventually(lambda: evaluator.lives == 2 and router.workers == [evaluator.url])
        assert evaluator.version == "0.0" and holds(evaluator, tensors_of("0.0"))
        kept_then = len(list((tmp_path / kept).iterdir()))
        await it.fleet.controller.pin_eval_fleet()
        assert evaluator.version == "0.5" and holds(evaluator, tensors_of("0.5"))
        for version in ("0.6", "0.7"):
            await it.publish(version)
            await it.copy()
        assert len(list((tmp_path / kept).iterdir())) <= kept_then, "what nobody uses goes"


@KEPT
async def test_an_engine_that_is_slow_to_catch_up_reads_one_copy_to_its_end(
    start_fleet: StartFleet, tmp_path: Path, kept: str
) -> None:
    async with rig(start_fleet, engines=2, restarts=3, **by(kept, tmp_path)) as it:
        await it.publish("0.0")
        read: list[bool] = []

        async def overtake() -> None:
            (directory,) = it.fleet.controller.copies_in_use()
            for step in range(1, 5):
                await it.publish(f"0.{step}")
                await it.copy()
            read.append(directory.exists() and directory in it.fleet.controller.copies_in_use())

        it.fleet.engines[0].script(instead("update_weights_from_disk", overtake))
        await it.fleet.host.kill("engine-0")
        await eventually(lambda: it.serves(0, "0.4") and it.serves(1, "0.4"))
        assert read == [True]
        assert it.complaints() == []
        assert len(it.fleet.controller.copies_in_use()) == 1


async def test_a_publication_that_fails_leaves_the_published_files_as_they_are(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with rig(start_fleet, engines=1, disk=tmp_path / "disk") as it:
        await it.publish("0.0")
        it.fleet.engines[0].script(refuse("update_weights_from_disk", times=2))
        with pytest.raises(WeightUpdateError, match="reached no engine in 2 transfer"):
            await it.publish("0.1")
        await eventually(lambda: it.serves(0, "0.0"))
        assert it.complaints() == []


async def test_a_copy_that_somebody_removed_costs_no_engine_its_restarts(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with rig(start_fleet, engines=1, copies=tmp_path / "copies", restarts=1) as it:
        await it.publish("0.0")
        await it.copy()
        shutil.rmtree(tmp_path / "copies")
        await it.fleet.host.kill("engine-0")
        with anyio.fail_after(10):
            await it.fleet.controller.wait_publication_needed()
        assert it.fleet.controller.fleet().needs_publication
        await it.publish("0.0")
        assert it.serves(0, "0.0") and it.fleet.engines[0].lives == 2
        assert not it.fleet.controller.fleet().needs_publication


@pytest.mark.parametrize("how", ["damaged", "lacks tensors"])
async def test_a_copy_that_cannot_be_loaded_costs_no_engine_its_restarts(
    start_fleet: StartFleet, tmp_path: Path, how: str
) -> None:
    async with rig(start_fleet, engines=2, copies=tmp_path / "copies", restarts=1) as it:
        await it.publish("0.0")
        copy = await it.copy()
        assert copy is not None
        if how == "damaged":
            (copy / "model.safetensors").write_bytes(b"nonsense")
        else:
            save_file({"big": tensors_of("0.0")["big"]}, copy / "model.safetensors")
        await it.fleet.host.kill("engine-0")
        await eventually(lambda: it.fleet.states() == ["pending_weights", "serving"])
        assert not it.fleet.controller.fleet().needs_publication
        await it.fleet.host.kill("engine-1")
        await eventually(lambda: it.fleet.states() == ["pending_weights"] * 2)
        await eventually(lambda: it.fleet.controller.fleet().needs_publication)  # once it has tried to load the copy
        await it.publish("0.0")
        assert it.serves(0, "0.0") and it.serves(1, "0.0") and it.complaints() == []
        assert [engine.lives for engine in it.fleet.engines] == [2, 2]
        await it.publish("0.1")
        assert it.fleet.controller.copies_in_use() == {tmp_path / "copies" / "0.1"}


async def test_a_disk_that_does_not_answer_keeps_an_engine_from_its_copy_and_nobody_else_from_anything(
    start_fleet: StartFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(start_fleet, engines=2, copies=tmp_path / "copies", restarts=1) as it:
        await it.publish("0.0")
        await it.copy()
        monkeypatch.setattr(copies_in_use, "LOOK_TIMEOUT_S", 0.3)
        exists, answers = Path.exists, threading.Event()

        def hangs(path: Path) -> bool:
            if path.is_relative_to(tmp_path / "copies"):
                assert threading.current_thread() is not threading.main_thread()
                answers.wait(5.0)
            return exists(path)

        monkeypatch.setattr(Path, "exists", hangs)
        try:
            await it.fleet.host.kill("engine-0")
            await eventually(lambda: it.fleet.states() == ["pending_weights", "serving"])
            await eventually(lambda: not it.fleet.controller.copies_in_use())  # it is not counted on any more
        finally:
            answers.set()
        await it.publish("0.1")
        assert it.serves(0, "0.1") and it.serves(1, "0.1")
