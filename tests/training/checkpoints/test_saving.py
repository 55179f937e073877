"""TrainGroup.save_checkpoint and resume over scripted ranks: beside the training, through full and slow disks."""

from __future__ import annotations

import resource
import threading
import time
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from asyncrl.observability.events import EventLog
from asyncrl.observability.timeline import TIMELINE
from asyncrl.training.checkpoints import saver, writing
from asyncrl.training.train_group import TrainGroup
from tests.training.worlds import ScriptedBackend, make_batch, run_world

EXTRA = {"ledger.json": b"{}", "cursor.json": b"[7]"}


def config_of(directory: Path, **checkpoint: Any) -> dict[str, Any]:
    return {"run": {"dir": str(directory)}, "checkpoint": checkpoint}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def faults(events: EventLog) -> list[str]:
    return [str(event["what"]) for event in events.recent if event["kind"] == "fault_seen"]


async def until(events: EventLog, kind: str, count: int = 1) -> None:
    reached = anyio.Event()

    def look(_: object) -> None:
        if sum(event["kind"] == kind for event in events.recent) >= count:
            reached.set()

    events.listen(look)
    look(None)
    with anyio.fail_after(10):
        await reached.wait()


async def eventually(satisfied: Callable[[], bool]) -> None:
    """Waits for what no event tells."""
    with anyio.fail_after(10):
        while True:
            if satisfied():
                return
            await anyio.sleep(0.005)


def be_patient(group: TrainGroup) -> None:
    """From now on `checkpoint.timeout_s` is that of the writing alone, and not of what rank 0's own disk does."""
    on_disk = group._checkpoints._on_disk

    def patiently(what: str, call: Callable[[], Any], timeout_s: float) -> Awaitable[Any]:
        return on_disk(what, call, 60.0)

    group._checkpoints._on_disk = patiently  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_job_goes_on_where_the_last_checkpoint_was_and_has_the_files_of_others_back(
    world_size: int, tmp_path: Path
) -> None:
    async def first(group: TrainGroup, events: EventLog) -> Any:
        start = await group.init()
        for step in range(4):
            await group.train(step, make_batch())
            await group.save_checkpoint(step, EXTRA if step == 3 else None, wait=step < 3)
        return start, group.resumed  # the last one is completed by the disposal

    async def second(group: TrainGroup, events: EventLog) -> Any:
        start = await group.init()
        assert group.resumed is not None
        await group.train(start, make_batch())
        kinds = [event["kind"] for event in events.recent]
        return start, dict(group.resumed.extra), kinds, group.statistics().step

    config = config_of(tmp_path, keep_last=2, keep_every=0)
    assert run_world(first, world_size=world_size, config=config).value == (0, None)
    assert names(tmp_path) == ["step-000003", "step-000004"]
    world = run_world(second, world_size=world_size, config=config)
    assert world.value == (4, EXTRA, ["trainer_resumed", "trainer_ready", "trainer_stepped"], 5)
    assert world.exit_codes == (0,) * world_size


def limit_files(backend: ScriptedBackend) -> None:
    """The last rank's disk takes only tiny files from now on; rank 0's log is a file too."""
    if backend.layout.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))


def test_a_rank_that_cannot_write_costs_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    async def before(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        await group.train(0, make_batch())
        return str(await group.save_checkpoint(0, wait=True))

    async def full(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        await group.train(1, make_batch())
        saved = await group.save_checkpoint(1, EXTRA, wait=True)
        await group.train(2, make_batch())
        return saved, faults(events), group.statistics().step

    config = config_of(tmp_path)
    assert run_world(before, config=config).value.endswith("checkpoints/step-000001")
    saved, [what], step = run_world(full, config=config, on_init=limit_files).value
    assert (saved, step) == (None, 3)
    assert what.startswith("the checkpoint of step 2 was not written: ")
    assert "rank 1: OSError" in what and "File too large" in what
    assert names(tmp_path) == ["step-000001"], "nothing is left of it, and the former one is intact"


def test_on_a_disk_without_room_for_the_extra_files_the_former_checkpoint_stays(small_disk: Path) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        saved = [
            await group.save_checkpoint(0, {"a": b"x"}, wait=True),
            await group.save_checkpoint(1, {"a": bytes(100_000)}, wait=True),
            await group.save_checkpoint(2, {"a": b"x"}, wait=True),
        ]
        return [path is not None for path in saved], faults(events)

    saved, what = run_world(scenario, world_size=1, config=config_of(small_disk, keep_last=5)).value
    assert saved == [True, False, True]
    assert what == ["the checkpoint of step 2 was not written: [Errno 28] No space left on device"]
    assert names(small_disk) == ["step-000001", "step-000003"]


def slow_disk(backend: ScriptedBackend) -> None:
    """The last rank's disk answers once a file `go` is in the run directory."""
    if backend.layout.rank == backend.layout.world_size - 1:
        write, go = writing.write_snapshots, backend.config.run.dir / "go"

        def slow(*arguments: Any) -> Any:
            while not go.exists():
                time.sleep(0.005)
            return write(*arguments)

        writing.write_snapshots = slow


def test_a_slow_disk_is_named_and_costs_the_checkpoints_that_come_due_meanwhile(tmp_path: Path) -> None:
    still = "rank 1 still writes the checkpoint of step 1 after 0.3 s"

    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        be_patient(group)
        await group.init()
        results = []
        for step in range(3):
            await group.train(step, make_batch())  # nothing stands still
            results.append(await group.save_checkpoint(step))
        await eventually(lambda: still in faults(events))
        said = faults(events)
        waited = await group.save_checkpoint(3, wait=True)
        (tmp_path / "go").touch()
        await until(events, "checkpoint_written")
        await eventually(lambda: group.statistics().saving is None)
        results.append(await group.save_checkpoint(4))
        await until(events, "checkpoint_written", 2)
        return results, waited, said, [e["step"] for e in events.recent if e["kind"] == "checkpoint_written"]

    config = config_of(tmp_path, timeout_s=0.3)
    results, waited, said, written = run_world(scenario, world_size=2, config=config, on_init=slow_disk).value
    path = tmp_path / "checkpoints"
    assert results == [path / "step-000001", None, None, path / "step-000005"]
    assert waited is None
    assert written == [1, 5]
    assert {what for what in said if not what.startswith("rank 0")} == {  # which may take a while too
        "no checkpoint of step 2: that of step 1 is still being written",
        "no checkpoint of step 3: that of step 1 is still being written",
        still,
    }


def test_a_checkpoint_that_is_being_written_is_told_of_and_can_be_waited_for(tmp_path: Path) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        await group.train(0, make_batch())
        await group.save_checkpoint(0)
        before = group.statistics()
        (tmp_path / "go").touch()
        await group.finish_checkpoint()
        after = group.statistics()
        assert before.checkpoint is None and after.checkpoint is not None
        return before.saving, after.saving, after.checkpoint.step

    world = run_world(scenario, world_size=1, config=config_of(tmp_path), on_init=slow_disk)
    assert world.value == (1, None, 1)


def test_the_checkpoints_of_every_nth_step_outlive_newer_ones(tmp_path: Path) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        for step in range(5):
            await group.save_checkpoint(step, wait=True)

    run_world(scenario, world_size=1, config=config_of(tmp_path, keep_last=1, keep_every=2))
    assert names(tmp_path) == ["step-000002", "step-000004", "step-000005"]


def test_a_disk_that_never_answers_does_not_hold_the_end_of_the_job(tmp_path: Path) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        be_patient(group)
        await group.init()
        return str(await group.save_checkpoint(0))

    world = run_world(scenario, world_size=2, config=config_of(tmp_path, timeout_s=0.2), on_init=slow_disk)
    assert world.value.endswith("step-000001") and world.exit_codes == (0, 0)
    assert world.seconds < 10
    assert not (tmp_path / "checkpoints/step-000001").exists()


def test_a_checkpoint_that_is_being_written_when_the_job_fails_is_completed(tmp_path: Path) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        async def fail() -> None:
            (tmp_path / "go").touch()
            raise ValueError("an engine is lost")

        await group.init()
        await group.save_checkpoint(0)
        group._ranks._task_group.start_soon(fail)  # beside the loop, which is cancelled for it
        await anyio.sleep_forever()

    with pytest.raises(AssertionError, match="an engine is lost"):
        run_world(scenario, world_size=1, config=config_of(tmp_path), on_init=slow_disk)
    assert names(tmp_path) == ["step-000001"]


def test_a_caller_that_gives_up_while_the_state_is_copied_leaves_room_for_the_next(tmp_path: Path) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.train, 0, make_batch())
            await eventually(lambda: group.statistics().thread.running == "training on rollout 0")
            async with anyio.create_task_group() as saving:
                saving.start_soon(group.save_checkpoint, 0)
                await eventually(lambda: group.statistics().thread.queued == 1)  # its copy, behind the training
                saving.cancel_scope.cancel()
            (tmp_path / "go").touch()
        await until(events, "fault_seen")
        return str(await group.save_checkpoint(1, wait=True)), faults(events)

    def slow_training(backend: ScriptedBackend) -> None:
        def wait_for_go() -> None:
            while not (tmp_path / "go").exists():
                time.sleep(0.005)

        backend.faults = {(0, "forward_backward"): wait_for_go}

    saved, [what] = run_world(scenario, world_size=2, config=config_of(tmp_path), on_init=slow_training).value
    assert saved.endswith("step-000002")
    assert what == "the checkpoint of step 1 was not written: its copy was given up"
    assert names(tmp_path) == ["step-000002"]


@pytest.mark.parametrize("how", ["cancelled", "out of time"])
def test_a_directory_that_is_made_when_nobody_waits_for_it_any_more_is_removed(how: str, tmp_path: Path) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        begun, answers, mkdir = threading.Event(), threading.Event(), Path.mkdir

        def slow(path: Path, *arguments: Any, **more: Any) -> None:
            begun.set()
            assert answers.wait(60)
            mkdir(path, *arguments, **more)

        await group.init()
        patience_s = saver._ROOM_TIMEOUT_S
        if how == "out of time":
            saver._ROOM_TIMEOUT_S = 0.3  # in a process of its own
        Path.mkdir = slow  # type: ignore[method-assign, assignment]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.save_checkpoint, 0)
            if how == "cancelled":
                await eventually(begun.is_set)
                tasks.cancel_scope.cancel()
        assert group.statistics().saving is None
        Path.mkdir = mkdir  # type: ignore[method-assign]
        saver._ROOM_TIMEOUT_S = patience_s
        answers.set()
        return str(await group.save_checkpoint(1, wait=True)), faults(events)

    saved, [what] = run_world(scenario, world_size=1, config=config_of(tmp_path)).value
    assert saved.endswith("step-000002") and names(tmp_path) == ["step-000002"]
    assert what == "no checkpoint of step 1: " + (
        "it was given up" if how == "cancelled" else "no room for the checkpoint from trainer thread after 0.3 s"
    )


def test_a_resume_in_another_layout_is_told_with_both_layouts(tmp_path: Path) -> None:
    async def save(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        return await group.save_checkpoint(0, EXTRA, wait=True) is not None

    async def resume(group: TrainGroup, events: EventLog) -> Any:
        start = await group.init()
        assert group.resumed is not None and group.resumed.extra == EXTRA
        [told] = [event for event in events.recent if event["kind"] == "trainer_resumed"]
        return start, group.resumed.other_layout, TIMELINE["trainer_resumed"].entry(told).text

    async def never(group: TrainGroup, events: EventLog) -> Any:
        events.attempt += 1  # it was another attempt that wrote it
        return await group.init(), group.resumed

    assert run_world(save, world_size=2, config=config_of(tmp_path)).value
    start, layouts, line = run_world(resume, world_size=1, config=config_of(tmp_path)).value
    assert start == 1
    assert layouts == (
        "written by 2 ranks (tensor parallel 1, data parallel 2), read by 1 rank (tensor parallel 1, data parallel 1)"
    )
    assert line.endswith(f"checkpoints/step-000001, in another layout: {layouts}")
    assert run_world(never, world_size=1, config=config_of(tmp_path, resume="never")).value == (0, None)


@pytest.mark.parametrize(("first_attempt", "begins_at"), [(3, 1), (4, 0)])
def test_a_gang_that_is_never_to_resume_goes_on_from_its_own_checkpoints_and_from_no_others(
    tmp_path: Path, first_attempt: int, begins_at: int
) -> None:
    async def save(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        return events.attempt, await group.save_checkpoint(0, wait=True) is not None

    async def again(group: TrainGroup, events: EventLog) -> Any:
        events.attempt, group._checkpoints._first_attempt = 5, first_attempt
        return await group.init()

    config = config_of(tmp_path, resume="never")
    assert run_world(save, world_size=1, config=config).value == (3, True)
    assert run_world(again, world_size=1, config=config).value == begins_at


def test_a_checkpoint_holds_the_configuration_and_a_resume_tells_what_changed_in_the_training(tmp_path: Path) -> None:
    async def save(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        return str(await group.save_checkpoint(0, EXTRA, wait=True))

    async def resume(group: TrainGroup, events: EventLog) -> Any:
        with capture_logs() as logs:
            return await group.init(), [line["changed"] for line in logs if "other settings" in line["event"]]

    config: dict[str, Any] = config_of(tmp_path) | {"data": {"args": {"hf_token": "s3cret"}}}
    path = Path(run_world(save, world_size=1, config=config | {"train": {"lr": 1e-3}}).value)
    saved = (path / "config.toml").read_text()
    assert tomllib.loads(saved)["train"]["lr"] == 1e-3 and "<redacted>" in saved and "s3cret" not in saved
    same = config | {"train": {"lr": 1e-3, "step_timeout_s": 9.0}, "run": {"dir": str(tmp_path), "export": False}}
    assert run_world(resume, world_size=1, config=same).value == (1, [])
    other = config | {"train": {"num_steps": None, "lr": 2e-3}, "rollout": {"prompts_per_step": 3}}
    assert run_world(resume, world_size=1, config=other).value == (
        1,
        [("rollout.prompts_per_step was 8, is 3", "train.num_steps was 100, is none", "train.lr was 0.001, is 0.002")],
    )


def test_a_directory_that_cannot_be_made_costs_the_checkpoint(tmp_path: Path) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        await group.init()
        (tmp_path / "checkpoints").touch()
        saved = [await group.save_checkpoint(0), await group.save_checkpoint(1, wait=True)]
        (tmp_path / "checkpoints").unlink()
        return saved, str(await group.save_checkpoint(2, wait=True)), faults(events)

    saved, later, what = run_world(scenario, world_size=1, config=config_of(tmp_path)).value
    assert saved == [None, None]
    assert later.endswith("step-000003")
    assert len(what) == 2 and what[0].startswith("no checkpoint of step 1: [Errno 20] Not a directory")


def test_a_disk_that_makes_no_directory_costs_the_checkpoint_and_no_step(tmp_path: Path) -> None:
    async def scenario(group: TrainGroup, events: EventLog) -> Any:
        patience_s, saver._ROOM_TIMEOUT_S = saver._ROOM_TIMEOUT_S, 0.3  # in a process of its own
        await group.init()
        answers = threading.Event()
        group._checkpoints._thread().submit(answers.wait, what="a disk that hangs")
        with anyio.fail_after(20):
            saved = await group.save_checkpoint(0)
            await group.train(1, make_batch())
        saver._ROOM_TIMEOUT_S = patience_s
        answers.set()
        return saved, faults(events), str(await group.save_checkpoint(1, wait=True))

    saved, told, later = run_world(scenario, world_size=1, config=config_of(tmp_path)).value
    assert saved is None and told == [
        "no checkpoint of step 1: no room for the checkpoint from trainer thread after 0.3 s"
    ]
    assert later.endswith("step-000002") and names(tmp_path) == ["step-000002"]
