"""When a run is saved, and how it goes on, over parts that only note what is asked of them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncrl.errors import ConfigError, EngineError, RolloutError
from asyncrl.observability.events import EventLog, read_events
from asyncrl.rollout.group_events import GroupDropped, GroupFiltered, GroupsTrained
from asyncrl.rollout.scheduling.ledger import Reached
from asyncrl.run.checkpoints import Checkpoints
from asyncrl.run.turns import Halves
from asyncrl.training.checkpoints.saver import Written
from tests.run.jobs import Engines, Executor, Trainer, a_job, started

pytestmark = pytest.mark.anyio

TURN = ["executor.engines_paused", "engines.offload", "trainer.onload"]
"""Of the trainer, where engines share its GPUs."""
SAVE = ["executor.save", "trainer.save_checkpoint 6 {} wait"]


def checkpoints(job: Any, calls: list[str], trainer: Any, *, engines: Any = None, executor: Any = None) -> Checkpoints:
    executor = executor or Executor(calls)
    job.pauses.add(executor)
    return Checkpoints(job, Halves(engines or Engines(calls), trainer), executor, "trainer")


@pytest.mark.parametrize(
    ("every", "rollout_id", "last", "saved"),
    [(2, 1, False, True), (2, 2, False, False), (2, 2, True, True), (0, 1, True, False)],
)
async def test_a_checkpoint_is_written_when_it_is_due_and_at_the_end(
    every: int, rollout_id: int, last: bool, saved: bool
) -> None:
    calls: list[str] = []
    of_run = checkpoints(a_job(checkpoint={"every": every}), calls, Trainer(calls))
    await of_run.save_if_due(rollout_id, last=last)
    wait = " wait" if last else ""
    assert calls == (["executor.save", f"trainer.save_checkpoint {rollout_id} {{}}{wait}"] if saved else [])


def a_directory(path: Path, attempt: int = 1, *, kept: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        path=path,
        events=path / "events.jsonl",
        attempt=attempt,
        set_results_aside=lambda: tuple(path / name for name in kept),
    )


async def test_an_attempt_that_finds_no_checkpoint_says_that_it_begins_anew(tmp_path: Path) -> None:
    with closing(EventLog(tmp_path / "events.jsonl", attempt=1)) as events:
        job = a_job()
        job.events, job.directory = events, a_directory(tmp_path, kept=("export.attempt-0", "summary.attempt-0.json"))
        await checkpoints(job, [], Trainer([])).resume(0)
    (note,) = job.record.notes
    assert note.startswith("no checkpoint to go on from: training begins at the model, with step 1; what the attempt")
    assert note.endswith(" before left is kept in export.attempt-0, summary.attempt-0.json")


@pytest.mark.parametrize(("step", "lost"), [(7, "3 steps of"), (5, "step of"), (4, "")])
async def test_a_signal_where_no_checkpoints_are_kept_tells_what_is_lost(step: int, lost: str) -> None:
    calls: list[str] = []
    job = a_job()
    job.directory = a_directory(Path("runs/mine"))
    await checkpoints(job, calls, Trainer(calls, step, resumed_at=4)).save_now()
    assert calls == [] and len(job.record.notes) == bool(lost)
    if lost:
        (note,) = job.record.notes
        assert note.startswith("no checkpoint was written, as checkpoint.every is 0: ")
        assert f"no job can go on after the {lost} this attempt; set it" in note
        assert "asyncrl stop runs/mine" in note


async def test_a_restarted_job_without_a_checkpoint_rolls_back_everything(tmp_path: Path) -> None:
    with closing(EventLog(tmp_path / "events.jsonl")) as first:
        first.emit(GroupsTrained(rollout_id=0, group_ids=("a", "b")))
    calls: list[str] = []
    with closing(EventLog(tmp_path / "events.jsonl", attempt=1)) as second:
        job = a_job()
        job.events, job.directory = second, a_directory(tmp_path)
        of_run = checkpoints(job, calls, Trainer(calls))
        await of_run.resume(0)
        await of_run.resume(0)  # what was rolled back once is not rolled back again
    told = [event for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "groups_rolled_back"]
    assert [(event["step"], event["group_ids"]) for event in told] == [(0, ["a", "b"])]
    assert calls == []


async def test_what_a_resumed_job_had_not_ended_in_its_checkpoint_is_rolled_back_however_it_ended(
    tmp_path: Path,
) -> None:
    log = tmp_path / "events.jsonl"
    with closing(EventLog(log)) as first:
        first.emit(GroupsTrained(rollout_id=0, group_ids=("00000000",)))
        first.emit(GroupFiltered(group_id="00000001", reason="all equal"))
        first.emit(GroupDropped(group_id="00000002", reason="its rollout was not delivered"))
    with closing(EventLog(log, attempt=1)) as second:
        job = a_job()
        job.events, job.directory = second, SimpleNamespace(events=log, attempt=1)
        executor = Executor([], restore=Reached(3, {1: 0, 2: 0}))
        await checkpoints(job, [], Trainer([], resumed_at=1), executor=executor).resume(1)
        assert job.record.notes == ["resumed from PATH"]
    told = [event for event in read_events(log) if event["kind"] == "groups_rolled_back"]
    assert [(event["step"], event["group_ids"]) for event in told] == [(1, ["00000001", "00000002"])]


async def test_a_job_that_goes_on_in_another_layout_says_so(tmp_path: Path) -> None:
    job = a_job()
    trainer = Trainer([], resumed_at=1)
    trainer.resumed.other_layout = "written by 2 ranks, read by 1 rank"
    await checkpoints(job, [], trainer, executor=Executor([], restore=None)).resume(1)
    assert job.record.notes == ["resumed from PATH, in another layout: written by 2 ranks, read by 1 rank"]


GOES_ON = "step 7 is saved: the same command with --run.if-exists resume goes on after it"
WITH_THE_CRITIC = RolloutError("rollout 6 was delivered and not committed")


@pytest.mark.parametrize(
    ("step", "newest", "how", "told"),
    [
        (7, Written(6, 0.5), {}, None),
        (7, None, {}, None),
        (7, Written(6, 99.0), {}, "the last one took 99.0 s, and there are 6 s for it"),
        (7, Written(7, 0.5), {}, ""),
        (4, None, {}, ""),
        (7, None, {"failure": "rank 1 died"}, ""),
        (7, None, {"save": WITH_THE_CRITIC}, str(WITH_THE_CRITIC)),
        (7, None, {"written": None}, "none was written within 6 s"),
        (7, None, {"colocated": True}, None),
        (7, None, {"colocated": True, "offload": EngineError("no room")}, "no room"),
        (7, None, {"saving": 6}, None),
    ],
)
async def test_a_job_that_a_signal_stops_is_saved_if_there_is_something_to_save_and_time_for_it(
    step: int, newest: Written | None, how: dict[str, Any], told: str | None
) -> None:
    """`told`: None where it is saved now, else why not; empty where that is no news or it was saved before."""
    calls: list[str] = []
    colocated = how.get("colocated", False)
    job = a_job(colocated=colocated, checkpoint={"every": how.get("every", 3)}, run={"stop_grace_s": 12})
    trainer = Trainer(calls, step, resumed_at=4, settle=step, save_checkpoint=how.get("written", "PATH"))
    trainer.failure, trainer.newest, trainer.saving = how.get("failure"), newest, how.get("saving")
    of_run = checkpoints(
        job,
        calls,
        trainer,
        engines=Engines(calls, offload=how.get("offload")),
        executor=Executor(calls, save=how.get("save", {})),
    )
    await of_run.save_now()
    assert (SAVE[1] in calls) == (told is None or "written" in how)
    if told is None:
        turn = TURN if colocated else []
        assert calls == ["trainer.settle", f"executor.settle {step} trainer", *turn, *SAVE]
    if trainer.failure or step == 4:
        assert job.record.notes == []
    else:
        assert job.record.notes == [f"stopped without a checkpoint of step 7: {told}" if told else GOES_ON]


class Saving(Trainer):
    """A trainer after 7 steps; the checkpoint of `saving` is being written, and `ends` in some way once waited for."""

    def __init__(self, calls: list[str], saving: int | None = None, newest: int | None = None, ends: str = "") -> None:
        super().__init__(calls, 7, resumed_at=4, settle=7)
        self.running = "training on rollout 7"
        self.saving, self._ends = saving, ends
        self.newest = None if newest is None else Written(newest, 99.0)

    async def finish_checkpoint(self) -> None:
        self.note("finish_checkpoint")
        if self._ends == "hangs":
            await anyio.sleep_forever()
        if self._ends == "complete":
            assert self.saving is not None
            self.newest = Written(self.saving, 99.0)
        self.saving = None


@pytest.mark.parametrize(
    ("ends", "saved", "told"),
    [
        ("complete", False, [GOES_ON]),
        ("failed", True, [GOES_ON]),
        ("hangs", False, ["stopped while the checkpoint of step 7 was still being written after 0.05 s"]),
    ],
)
async def test_a_signal_that_finds_the_checkpoint_of_the_last_step_half_written_has_it_finished_and_not_begun_again(
    ends: str, saved: bool, told: list[str]
) -> None:
    calls: list[str] = []
    job = a_job(checkpoint={"every": 3}, run={"stop_grace_s": 0.1})
    of_run = checkpoints(job, calls, Saving(calls, saving=7, ends=ends))
    with anyio.move_on_after(0.05):
        await of_run.save_now()
    settled = ["trainer.settle", "executor.settle 7 trainer", "trainer.finish_checkpoint"]
    assert calls == [*settled, *(SAVE if saved else [])]
    assert job.record.notes == told


async def test_a_step_that_outlasts_the_time_for_it_is_what_a_stopped_job_names() -> None:
    job = a_job(checkpoint={"every": 3}, run={"stop_grace_s": 0.1})
    trainer: Any = Saving([])
    trainer.settle = anyio.sleep_forever
    with anyio.move_on_after(0.05):
        await checkpoints(job, [], trainer).save_now()
    [note] = job.record.notes
    assert note == "stopped without a checkpoint of step 8: training on rollout 7 did not end within 0.05 s"


@pytest.mark.parametrize(
    ("trainer", "asked"),
    [
        ({}, SAVE),
        ({"newest": 6}, SAVE),
        ({"newest": 7}, []),
        ({"saving": 7, "ends": "complete"}, ["trainer.finish_checkpoint"]),
    ],
)
async def test_the_last_step_is_saved_once_whenever_the_stop_was_asked_for(
    trainer: dict[str, Any], asked: list[str]
) -> None:
    for every in (0, 3):
        calls: list[str] = []
        of_run = checkpoints(a_job(checkpoint={"every": every}), calls, Saving(calls, **trainer))
        await of_run.save_last()
        assert calls == (asked if every else [])


async def test_a_loop_that_trained_nothing_leaves_no_checkpoint() -> None:
    calls: list[str] = []
    trainer = Trainer(calls, 7, resumed_at=7)
    await checkpoints(a_job(checkpoint={"every": 3}), calls, trainer).save_last()
    assert calls == []


async def test_engines_on_the_trainers_gpus_make_room_for_the_last_checkpoint_and_come_back() -> None:
    calls: list[str] = []
    job = a_job(colocated=True, checkpoint={"every": 3}, run={"export": False})
    async with started(Engines(calls), Executor(calls), Trainer(calls), job=job) as run:
        await run.train(0, await run.next_batch(0))
        await run.commit(0)
        await run.publish(0)
        calls.clear()
        await run.finish()
    assert calls[:5] == [*TURN, "executor.save", "trainer.save_checkpoint 0 {} wait"]
    back = ["trainer.offload keep_weights", "engines.onload_weights", "trainer.update_weights 0"]
    assert calls[5:] == [*back, "trainer.offload", "engines.onload_kv", "executor.engines_resumed"]


@pytest.mark.parametrize("stages", [("train", "commit"), ("train",)])
async def test_a_loop_without_a_checkpoint_still_saves_at_a_signal(stages: tuple[str, ...]) -> None:
    """As the driver does it: the loop is cancelled, then what it left to be done is done."""
    calls: list[str] = []
    job = a_job(checkpoint={"every": 100}, run={"stop_grace_s": 12})
    trainer = Trainer(calls, settle=1)
    async with started(Engines(calls), Executor(calls), trainer, job=job) as run:

        async def loop() -> None:
            for step in run.steps():
                await run.train(step, await run.next_batch(step))
                if "commit" in stages:
                    await run.commit(step)
                await anyio.sleep_forever()

        async with anyio.create_task_group() as loops:
            loops.start_soon(loop)
            await anyio.wait_all_tasks_blocked()
            loops.cancel_scope.cancel()
        calls.clear()
        for keep in job.on_stop_now:
            await keep()
        assert calls == [
            "trainer.settle",
            "executor.settle 1 trainer",
            "executor.save",
            "trainer.save_checkpoint 0 {} wait",
        ]
        assert run.statistics().background == (), "nothing else uses the trainer any more"


async def test_every_executor_of_a_run_is_saved_and_goes_on_with_its_own_files() -> None:
    calls: list[str] = []
    one, other = Executor(calls, save={"rollout.json": b"1"}), Executor(calls, save={"rollout.json": b"2"})
    other.name = "code"
    trainer, saved = Trainer(calls), {"rollout.json": b"1", "code.rollout.json": b"2"}
    of_run = checkpoints(a_job(checkpoint={"every": 1}), calls, trainer, executor=one)
    await of_run.add(other)
    await of_run.add(other)
    await of_run.save_if_due(0, last=False)
    assert calls == ["executor.save", "executor.save", f"trainer.save_checkpoint 0 {saved}"]

    calls.clear()
    trainer = Trainer(calls, resumed_at=1)
    trainer.resumed.extra = saved
    job = a_job()
    of_run = checkpoints(job, calls, trainer, executor=one)
    await of_run.resume(1)
    await of_run.add(other)
    assert calls == [f"executor.restore {saved} 1", f"executor.restore { ({'rollout.json': b'2'}) } 1"]
    third = Executor(calls)
    third.name = "math"
    await of_run.add(third)
    assert job.record.notes[1:] == ["PATH knows no rollout executor 'math': it begins with its first prompt"]
    third = Executor(calls)
    third.name = "code"
    with pytest.raises(ConfigError, match="two rollout executors are named 'code'"):
        await of_run.add(third)


async def test_a_signal_settles_and_saves_every_executor() -> None:
    calls: list[str] = []
    other = Executor(calls)
    other.name = "code"
    of_run = checkpoints(a_job(checkpoint={"every": 100}), calls, Trainer(calls, step=7, settle=7))
    await of_run.add(other)
    await of_run.save_now()
    settled = ["trainer.settle", "executor.settle 7 trainer", "executor.settle 7 trainer"]
    assert calls == [*settled, "executor.save", *SAVE]
