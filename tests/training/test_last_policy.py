"""What is left of a policy when its job ends: an export, a checkpoint, or else its newest published weights."""

from __future__ import annotations

import errno
import json
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest
from safetensors.torch import load_file

from asyncrl.config import Config
from asyncrl.data.fleet import EngineEndpoint
from asyncrl.errors import ExportError, TrainerError
from asyncrl.observability.events import EventLog
from asyncrl.tasks import Background
from asyncrl.training.train_group import Publishing, TrainGroup
from asyncrl.weights.copies import Copies
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.transports.disk import DiskTransport
from tests.inference.conftest import eventually
from tests.training.worlds import SPECS, Fault, ScriptedBackend, make_batch, raise_value_error, run_world
from tests.weights.fakes import AccountingFleet
from tests.weights.test_publication import ScriptedTransport

ENGINE = EngineEndpoint("engine-0", 0, "http://127.0.0.1:1", 1)
End = Callable[[TrainGroup], Awaitable[Any]]


def no_room() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class LoadsFromDisk:
    """An engine that takes any directory."""

    async def update_from_disk(self, *args: Any, **how: Any) -> None: ...


def a_job(
    run_dir: Path,
    end: End,
    *,
    attempt: int = 0,
    disk: bool = False,
    fault: tuple[str, Fault] | None = None,
    **more: Any,
) -> tuple[Any, list[str], list[str]]:
    """Trains and publishes two steps, then `end`; what that returned, what is left in the directory, what was told."""
    model = run_dir.parent / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("weights of the model")
    config = Config.model_validate({"run": {"dir": str(run_dir)}, "model": {"path": str(model)}} | more)
    faults = {} if fault is None else {(0, fault[0]): fault[1]}

    async def scenario(_: TrainGroup, __: EventLog) -> Any:
        events = EventLog(None, attempt=attempt)
        async with anyio.create_task_group() as task_group:
            background = Background(task_group)
            copies = None if disk else Copies(run_dir / "weights" / "published", background)
            fleet = AccountingFleet((ENGINE,))
            transport: Any = ScriptedTransport(exports=True)
            if disk:
                transport = DiskTransport(
                    lambda *of: nullcontext(LoadsFromDisk()),
                    directory=run_dir / "weights" / "transfer",
                    bucket_bytes=16,
                    timeout_s=5.0,
                )
            group = TrainGroup(
                config,
                task_group=task_group,
                make_backend=lambda *of: ScriptedBackend(*of, faults=faults),
                events=events,
                background=background,
                publishing=Publishing(
                    lambda source: Publisher(fleet, source, transport, events=events, copies=copies),
                    version_of=lambda step: f"{attempt}.{step}",
                ),
            )
            try:
                await group.init()
                for step in range(2):
                    await group.train(step, make_batch())
                    await group.update_weights(step)
                    await eventually(lambda: None not in fleet.copies.values(), 30.0)
                value = await end(group)
            finally:
                await group.dispose()
                if copies is not None:
                    await copies.aclose()
        told = [str(event["what"]) for event in events.recent if event["kind"] == "fault_seen"]
        return value, told

    value, told = run_world(scenario, world_size=1).value
    return value, sorted(path.name for path in run_dir.iterdir() if path.name != "weights"), told


async def fails_to_export(group: TrainGroup) -> Any:
    with pytest.raises(ExportError) as failed:
        await group.export_hf(Path("/nowhere/export"))
    return str(failed.value), (await group.train(2, make_batch()))["train/tokens"], group.statistics().failure


@pytest.mark.parametrize("disk", [False, True])
def test_a_policy_that_no_disk_takes_as_an_export_stays_as_its_newest_published_weights(
    tmp_path: Path, disk: bool
) -> None:
    run_dir = tmp_path / "run"
    (error, trained, failure), left, told = a_job(run_dir, fails_to_export, disk=disk, fault=("export_hf", no_room))
    assert "the policy of step 2 was not exported: /nowhere/export could not be written ([Errno 28]" in error
    assert trained and failure is None, "the trainer goes on"
    assert left == ["policy-0.2"]
    kept = run_dir / "policy-0.2"
    assert told == [
        f"no export and no checkpoint holds the policy of step 3; its newest published weights stay in {kept}"
    ]
    assert (kept / "config.json").read_text() == "{}"
    files = sorted(kept.glob("*.safetensors"))
    assert {name for file in files for name in load_file(file)} == {spec.name for spec in SPECS}
    if len(files) > 1:
        index = json.loads((kept / "model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == {spec.name for spec in SPECS} and {*index.values()} == {file.name for file in files}


@pytest.mark.parametrize(("config", "left"), [("{}", ["config.json", "model.safetensors"]), ("0" * 40_000, None)])
def test_on_a_full_disk_the_policy_has_its_config_where_the_other_copies_leave_room_for_it_and_never_half_of_it(
    small_disk: Path, config: str, left: list[str] | None
) -> None:
    async def fills_the_disk(group: TrainGroup) -> None:
        (small_disk / "model" / "config.json").write_text(config)
        with (small_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
            while True:
                assert filler.write(bytes(512))
        with pytest.raises(ExportError):
            await group.export_hf(small_disk / "run" / "export")

    assert a_job(small_disk / "run", fills_the_disk, fault=("export_hf", no_room))[1] == ["policy-0.2"]
    kept = small_disk / "run" / "policy-0.2"
    assert sorted(path.name for path in kept.iterdir()) == (left or ["model.safetensors"])
    assert load_file(kept / "model.safetensors").keys() == {spec.name for spec in SPECS}


async def breaks(group: TrainGroup) -> None:
    with pytest.raises(TrainerError):
        await group.export_hf(Path("/nowhere/export"))


async def exports(group: TrainGroup) -> None:
    await group.export_hf(group._config.run.dir / "export")


async def saves(group: TrainGroup) -> None:
    assert await group.save_checkpoint(1, wait=True)


async def just_ends(group: TrainGroup) -> None: ...


def test_the_policy_of_a_job_that_fails_stays(tmp_path: Path) -> None:
    _, left, _ = a_job(tmp_path / "run", breaks, fault=("export_hf", raise_value_error))
    assert left == ["policy-0.2"]


@pytest.mark.parametrize(
    ("end", "settings", "left"),
    [
        (exports, {}, ["export"]),
        (saves, {"checkpoint": {"every": 1}}, ["checkpoints"]),
        (just_ends, {"run": {"export": False}}, []),
    ],
)
def test_published_weights_go_with_a_job_that_has_left_its_policy_or_was_to_leave_none(
    tmp_path: Path, end: End, settings: dict[str, Any], left: list[str]
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    settings = settings | {"run": {"dir": str(run_dir)} | settings.get("run", {})}
    assert a_job(run_dir, end, **settings)[1:] == (left, [])


def test_a_policy_without_any_copy_is_told_to_be_lost(tmp_path: Path) -> None:
    async def nothing_is_left(group: TrainGroup) -> None:
        for copy in (tmp_path / "run" / "weights" / "published").iterdir():
            copy.rename(tmp_path / copy.name)

    (tmp_path / "run").mkdir()
    _, left, told = a_job(tmp_path / "run", nothing_is_left)
    assert left == [] and "what was trained after step 0 is lost" in told[0]


def test_weights_that_a_killed_attempt_left_outlive_one_that_begins_anew(tmp_path: Path) -> None:
    copy = tmp_path / "run" / "weights" / "published" / "0.7"
    copy.mkdir(parents=True)
    (copy / "model.safetensors").write_text("weights of attempt 0")
    _, left, _ = a_job(tmp_path / "run", exports, attempt=1)
    assert left == ["export", "policy-0.7"]
    assert (tmp_path / "run" / "policy-0.7" / "model.safetensors").read_text() == "weights of attempt 0"


def test_of_the_weights_that_jobs_leave_the_newest_stay(tmp_path: Path) -> None:
    for name in ("policy-0.1", "policy-0.7"):
        (tmp_path / "run" / name).mkdir(parents=True)
    _, left, _ = a_job(tmp_path / "run", just_ends, attempt=1)
    assert left == ["policy-0.7", "policy-1.2"], "those of fewer steps go"
