"""What loops do around their steps, over parts that only note what is asked of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncrl import phases
from asyncrl.components import RolloutComponents
from asyncrl.config.sections.checkpoint import CheckpointConfig
from asyncrl.config.sections.debug import DebugConfig
from asyncrl.config.sections.training import WarmupConfig
from asyncrl.errors import EngineError, RolloutError
from asyncrl.observability.events import EventLog, read_events
from asyncrl.phases import (
    checkpoint,
    evaluate,
    export,
    gather,
    last_checkpoint,
    make_room,
    publish,
    resume,
    trainers_turn,
    warm_up,
)
from asyncrl.rollout.evaluation import EvalReport, skipped_report
from asyncrl.rollout.group_events import GroupDropped, GroupFiltered, GroupsTrained
from asyncrl.rollout.scheduling.ledger import Reached
from asyncrl.training.checkpoints.saver import Written
from asyncrl.training.ranks.trainer_thread import TrainerThreadStatistics
from asyncrl.training.statistics import TrainGroupStatistics

pytestmark = pytest.mark.anyio


class Noted:
    """Answers every method; `calls` holds what was asked, of all parts in order."""

    def __init__(self, name: str, calls: list[str], **answers: Any) -> None:
        self._name, self._calls, self._answers = name, calls, answers

    def __getattr__(self, method: str) -> Any:
        def note(*args: Any, **how: Any) -> None:
            self._calls.append(" ".join([f"{self._name}.{method}", *map(str, args), *map(str, how)]))

        async def call(*args: Any, **how: Any) -> Any:
            note(*args, **how)
            answer = self._answers.get(method)
            if isinstance(answer, Exception):
                raise answer
            return answer

        @asynccontextmanager
        async def around() -> AsyncIterator[None]:
            note()
            yield
            self._calls.append(f"{self._name}.{method} ended")

        async def never() -> None:
            await anyio.sleep_forever()

        plain = {"set_weight_version": note, "set_eval_fleet": note, "updating": around}
        plain |= {"engines_paused": note, "engines_resumed": note}
        plain |= {"settle": note} if self._name == "executor" else {}
        return (plain | {"wait_publication_needed": never, "fleet": lambda: SimpleNamespace(serves=True)}).get(
            method, call
        )


def a_job(colocated: bool) -> Any:
    record = SimpleNamespace(phase=lambda name: nullcontext(), points=[], exported=lambda path: None)
    record.evaluated = lambda *point: record.points.append(point)
    return SimpleNamespace(
        config=SimpleNamespace(eval=SimpleNamespace(fleet=None), debug=DebugConfig()),
        layout=SimpleNamespace(colocated=colocated),
        record=record,
        run=SimpleNamespace(export="DIR"),
        events=SimpleNamespace(emit=lambda event: None),
        on_stop_now=[],
    )


@pytest.mark.parametrize("colocated", [True, False])
async def test_weights_are_published_while_the_trainer_holds_them(colocated: bool) -> None:
    calls: list[str] = []
    report = SimpleNamespace(version="0.4")
    parts = RolloutComponents(Noted("engines", calls), Noted("executor", calls), None)  # type: ignore[arg-type]
    trainer: Any = Noted("trainer", calls, update_weights=report)
    assert await publish(a_job(colocated), parts, trainer, 3) is report
    if not colocated:
        assert calls == ["trainer.update_weights 3"]
        return
    before, update = ["trainer.offload keep_weights", "engines.onload_weights"], ["trainer.update_weights 3"]
    after = ["executor.engines_paused", "trainer.offload", "engines.onload_kv", "executor.engines_resumed"]
    assert calls == [*before, *update, *after, "executor.set_weight_version 0.4"]


async def test_each_of_several_trainers_gathers_under_its_name() -> None:
    calls: list[str] = []
    engines, executor = Noted("engines", calls), Noted("executor", calls)
    parts = RolloutComponents(engines, executor, None)  # type: ignore[arg-type]
    trainer: Any = Noted("trainer", calls)
    await gather(a_job(False), parts, trainer, 3, "critic")
    assert calls == ["engines.prepare_rollout 3", "executor.get 3 critic"]


async def test_the_trainers_turn_on_shared_gpus_is_a_pause_of_the_engines() -> None:
    calls: list[str] = []
    parts = RolloutComponents(Noted("engines", calls), Noted("executor", calls), None)  # type: ignore[arg-type]
    await trainers_turn(a_job(False), parts, Noted("trainer", calls))  # type: ignore[arg-type]
    assert calls == []
    await trainers_turn(a_job(True), parts, Noted("trainer", calls))  # type: ignore[arg-type]
    assert calls == ["executor.engines_paused", "engines.offload", "trainer.onload"]


async def test_a_pause_of_engines_on_shared_gpus_ends_also_where_they_do_not_come_back() -> None:
    calls: list[str] = []
    engines: Any = Noted("engines", calls, onload_kv=EngineError("engine-0: gone"))
    parts = RolloutComponents(engines, Noted("executor", calls), None)  # type: ignore[arg-type]
    with pytest.raises(EngineError):
        await publish(a_job(True), parts, Noted("trainer", calls), 3)  # type: ignore[arg-type]
    assert calls[-1] == "executor.engines_resumed"


@pytest.mark.parametrize(
    ("colocated", "peak", "asked"),
    [
        (True, "gpu", ["engines.wait_ready", "engines.offload_kv"]),
        (True, "cpu", ["engines.wait_ready", "engines.offload"]),
        (False, "gpu", []),
    ],
)
async def test_colocated_engines_make_room_before_the_trainer_is_built(
    colocated: bool, peak: str, asked: list[str]
) -> None:
    calls: list[str] = []
    job = a_job(colocated)
    job.config = SimpleNamespace(engine=SimpleNamespace(colocate_memory_peak_device=peak))
    await make_room(job, Noted("engines", calls))  # type: ignore[arg-type]
    assert calls == asked


@pytest.mark.parametrize("colocated", [True, False])
async def test_an_export_brings_the_trainer_back_first(colocated: bool) -> None:
    calls: list[str] = []
    await export(a_job(colocated), Noted("engines", calls), Noted("trainer", calls), 3)  # type: ignore[arg-type]
    assert calls == [*(["engines.offload", "trainer.onload"] if colocated else []), "trainer.export_hf DIR"]


class Skipping:
    """An executor without engines."""

    def report_eval_skip(self, step: int, reason: str) -> EvalReport:
        return skipped_report(step, reason)


async def test_an_evaluation_that_cannot_begin_is_a_skipped_point() -> None:
    job = a_job(False)
    controller: Any = Noted("engines", [], prepare_eval=EngineError("engine-0: gone"))
    await evaluate(job, RolloutComponents(controller, Skipping(), None), Noted("trainer", []), 3)  # type: ignore[arg-type]
    assert job.record.points == [(3, None, {}, "engine-0: gone")]


@pytest.mark.parametrize("failure", [None, EngineError("eval-0 holds weights '0.1'")])
async def test_engines_that_only_evaluate_are_pinned_first_and_a_pin_that_fails_is_a_skipped_point(
    failure: EngineError | None,
) -> None:
    calls: list[str] = []
    skipped = skipped_report(3, "as told")
    job = a_job(False)
    job.config.eval.fleet = "some"
    engines: Any = Noted("engines", calls, pin_eval_fleet=failure or "INFO")
    executor: Any = Noted("executor", calls, eval=skipped)
    executor.report_eval_skip = lambda step, reason: calls.append(f"skip {step}: {reason}") or skipped
    await evaluate(job, RolloutComponents(engines, executor, None), Noted("trainer", calls), 3)  # type: ignore[arg-type]
    done = ["executor.set_eval_fleet INFO", "executor.eval 3"]
    assert calls == ["engines.pin_eval_fleet", *([f"skip 3: {failure}"] if failure else done)]


@pytest.mark.parametrize(
    ("every", "rollout_id", "last", "saved"),
    [(2, 1, False, True), (2, 2, False, False), (2, 2, True, True), (0, 1, True, False)],
)
async def test_a_checkpoint_is_written_when_it_is_due_and_at_the_end(
    every: int, rollout_id: int, last: bool, saved: bool
) -> None:
    calls: list[str] = []
    job = a_job(False)
    job.config = SimpleNamespace(checkpoint=CheckpointConfig(every=every))
    parts = RolloutComponents(Noted("engines", calls), Noted("executor", calls, save={}), None)  # type: ignore[arg-type]
    trainer: Any = Noted("trainer", calls)
    await checkpoint(job, parts, trainer, rollout_id, last=last)
    assert calls == (["executor.save", f"trainer.save_checkpoint {rollout_id} {{}} wait"] if saved else [])


async def test_a_restarted_job_without_a_checkpoint_rolls_back_everything(tmp_path: Path) -> None:
    with closing(EventLog(tmp_path / "events.jsonl")) as first:
        first.emit(GroupsTrained(rollout_id=0, group_ids=("a", "b")))
    calls: list[str] = []
    executor: Any = Noted("executor", calls)
    parts = RolloutComponents(Noted("engines", calls), executor, None)  # type: ignore[arg-type]
    trainer: Any = SimpleNamespace(resumed=None)
    with closing(EventLog(tmp_path / "events.jsonl", attempt=1)) as second:
        job = a_job(False)
        job.events, job.run = second, SimpleNamespace(events=tmp_path / "events.jsonl", attempt=1)
        await resume(job, parts, trainer, 0)
        await resume(job, parts, trainer, 0)  # what was rolled back once is not rolled back again
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
    executor: Any = Noted("executor", [], restore=Reached(3, {1: 0, 2: 0}))
    parts = RolloutComponents(Noted("engines", []), executor, None)  # type: ignore[arg-type]
    trainer: Any = SimpleNamespace(resumed=SimpleNamespace(step=1, path="PATH", extra={}))
    with closing(EventLog(log, attempt=1)) as second:
        job = a_job(False)
        job.events, job.run = second, SimpleNamespace(events=log, attempt=1)
        job.record.note = lambda text: None
        await resume(job, parts, trainer, 1)
    told = [event for event in read_events(log) if event["kind"] == "groups_rolled_back"]
    assert [(event["step"], event["group_ids"]) for event in told] == [(1, ["00000001", "00000002"])]


WITH_THE_CRITIC = RolloutError("rollout 6 was delivered and not committed")


@pytest.mark.parametrize(
    ("step", "newest", "how", "told"),
    [
        (7, Written(6, 0.5), {}, None),
        (7, None, {}, None),
        (7, Written(6, 99.0), {}, "the last one took 99.0 s, and there are 6 s for it"),
        (7, Written(7, 0.5), {}, ""),
        (4, None, {}, ""),
        (7, None, {"every": 0}, ""),
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
    """`told`: None where it is saved, else why not; empty where nothing need be said."""
    calls: list[str] = []
    notes: list[str] = []
    job = a_job(how.get("colocated", False))
    job.record.note = notes.append
    job.run = SimpleNamespace(attempt=0)
    job.config = SimpleNamespace(
        checkpoint=CheckpointConfig(every=how.get("every", 3)), run=SimpleNamespace(stop_grace_s=12)
    )
    executor: Any = Noted("executor", calls, save=how.get("save", {}))
    trainer: Any = Noted("trainer", calls, save_checkpoint=how.get("written", "PATH"), settle=step)
    trainer.resumed = SimpleNamespace(step=4, path="PATH", extra={})
    thread = TrainerThreadStatistics(None, None, 0)
    trainer.statistics = lambda: TrainGroupStatistics(thread, step, how.get("failure"), newest, how.get("saving"))
    engines: Any = Noted("engines", calls, offload=how.get("offload"))
    await resume(job, RolloutComponents(engines, executor, None), trainer, 4)
    notes.clear()
    [keep] = job.on_stop_now
    await keep()
    assert ("trainer.save_checkpoint 6 {} wait" in calls) == (told is None or "written" in how)
    if told is None:
        turn = ["executor.engines_paused", "engines.offload", "trainer.onload"] if job.layout.colocated else []
        save = ["executor.save", "trainer.save_checkpoint 6 {} wait"]
        assert calls[-4 - len(turn) :] == ["trainer.settle", f"executor.settle {step} trainer", *turn, *save]
    assert notes == ([f"stopped without a checkpoint of step 7: {told}"] if told else [])


class Saving(Noted):
    """A trainer after 7 steps; the checkpoint of `saving` is being written, and `ends` in some way once waited for."""

    def __init__(self, calls: list[str], saving: int | None = None, newest: int | None = None, ends: str = "") -> None:
        version = SimpleNamespace(version="0.7")
        super().__init__("trainer", calls, save_checkpoint="PATH", update_weights=version, settle=7)
        self.saving, self.newest, self._ends = saving, newest, ends
        self.resumed: Any = SimpleNamespace(step=4, path="PATH", extra={})

    def statistics(self) -> Any:
        newest = None if self.newest is None else Written(self.newest, 99.0)
        thread = TrainerThreadStatistics("training on rollout 7", 0.0, 0)
        return TrainGroupStatistics(thread, 7, None, newest, self.saving)

    async def finish_checkpoint(self) -> None:
        self._calls.append("trainer.finish_checkpoint")
        if self._ends == "hangs":
            await anyio.sleep_forever()
        if self._ends == "complete":
            self.newest = self.saving
        self.saving = None


@pytest.mark.parametrize(
    ("ends", "saved", "told"),
    [
        ("complete", False, []),
        ("failed", True, []),
        ("hangs", False, ["stopped while the checkpoint of step 7 was still being written after 0.05 s"]),
    ],
)
async def test_a_signal_that_finds_the_checkpoint_of_the_last_step_half_written_has_it_finished_and_not_begun_again(
    ends: str, saved: bool, told: list[str]
) -> None:
    calls: list[str] = []
    notes: list[str] = []
    job = a_job(False)
    job.record.note = notes.append
    job.run = SimpleNamespace(attempt=0)
    job.config = SimpleNamespace(checkpoint=CheckpointConfig(every=3), run=SimpleNamespace(stop_grace_s=0.1))
    trainer: Any = Saving(calls, saving=7, ends=ends)
    parts = RolloutComponents(Noted("engines", calls), Noted("executor", calls, save={}), None)  # type: ignore[arg-type]
    await resume(job, parts, trainer, 4)
    calls.clear()
    notes.clear()
    [keep] = job.on_stop_now
    with anyio.move_on_after(0.05):
        await keep()
    again = ["executor.save", "trainer.save_checkpoint 6 {} wait"] if saved else []
    assert calls == ["trainer.settle", "executor.settle 7 trainer", "trainer.finish_checkpoint", *again]
    assert notes == told


async def test_a_step_that_outlasts_the_time_for_it_is_what_a_stopped_job_names() -> None:
    notes: list[str] = []
    job = a_job(False)
    job.record.note = notes.append
    job.run = SimpleNamespace(attempt=0)
    job.config = SimpleNamespace(checkpoint=CheckpointConfig(every=3), run=SimpleNamespace(stop_grace_s=0.1))
    trainer: Any = Saving([])
    trainer.settle = anyio.sleep_forever
    parts = RolloutComponents(Noted("engines", []), Noted("executor", [], save={}), None)  # type: ignore[arg-type]
    await resume(job, parts, trainer, 4)
    notes.clear()
    [keep] = job.on_stop_now
    with anyio.move_on_after(0.05):
        await keep()
    assert notes == ["stopped without a checkpoint of step 8: training on rollout 7 did not end within 0.05 s"]


@pytest.mark.parametrize(
    ("trainer", "asked"),
    [
        ({}, ["executor.save", "trainer.save_checkpoint 6 {} wait"]),
        ({"newest": 6}, ["executor.save", "trainer.save_checkpoint 6 {} wait"]),
        ({"newest": 7}, []),
        ({"saving": 7, "ends": "complete"}, ["trainer.finish_checkpoint"]),
    ],
)
async def test_the_last_step_is_saved_once_whenever_the_stop_was_asked_for(
    trainer: dict[str, Any], asked: list[str]
) -> None:
    calls: list[str] = []
    parts = RolloutComponents(Noted("engines", calls), Noted("executor", calls, save={}), None)  # type: ignore[arg-type]
    for every in (0, 3):
        job = a_job(False)
        job.config = SimpleNamespace(checkpoint=CheckpointConfig(every=every))
        await last_checkpoint(job, parts, Saving(calls, **trainer))  # type: ignore[arg-type]
        assert calls == (asked if every else [])


async def test_a_loop_that_trained_nothing_leaves_no_checkpoint() -> None:
    calls: list[str] = []
    job = a_job(False)
    job.config = SimpleNamespace(checkpoint=CheckpointConfig(every=3))
    parts = RolloutComponents(Noted("engines", calls), Noted("executor", calls), None)  # type: ignore[arg-type]
    trainer: Any = Saving(calls)
    trainer.resumed = SimpleNamespace(step=7)
    await last_checkpoint(job, parts, trainer)
    assert calls == []


async def test_engines_on_the_trainers_gpus_make_room_for_the_last_checkpoint_and_come_back() -> None:
    calls: list[str] = []
    job = a_job(True)
    job.config = SimpleNamespace(checkpoint=CheckpointConfig(every=3))
    parts = RolloutComponents(Noted("engines", calls), Noted("executor", calls, save={}), None)  # type: ignore[arg-type]
    await last_checkpoint(job, parts, Saving(calls))  # type: ignore[arg-type]
    assert calls[:3] == ["executor.engines_paused", "engines.offload", "trainer.onload"]
    assert calls[3:6] == ["executor.save", "trainer.save_checkpoint 6 {} wait", "trainer.offload keep_weights"]
    assert "trainer.update_weights 6" in calls and calls[-1] == "executor.set_weight_version 0.7"


async def test_what_a_warm_up_trains_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    job = a_job(False)
    job.record.note = calls.append
    job.config = SimpleNamespace(warmup=WarmupConfig(steps=2, lr=1.0), debug=DebugConfig())
    monkeypatch.setattr(phases, "_load", lambda job: SimpleNamespace(next_batch=lambda step: f"BATCH-{step}"))
    trainer: Any = Noted("trainer", calls, train_sft={"train/loss": 0.5})
    trainer.resumed = None
    await warm_up(job, trainer)
    assert calls[:3] == [
        "trainer.train_sft None BATCH-0 1.0",
        "trainer.train_sft None BATCH-1 1.0",
        "trainer.reset_optimizer",
    ]


async def test_a_resumed_policy_is_not_warmed_up_again() -> None:
    job = a_job(False)
    job.config = SimpleNamespace(warmup=SimpleNamespace(steps=3), debug=DebugConfig())
    trainer: Any = SimpleNamespace(resumed="a checkpoint")
    await warm_up(job, trainer)
