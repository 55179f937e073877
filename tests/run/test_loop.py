"""The stages of a run, over parts that only note what is asked of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from asyncrl.errors import ConfigError, EngineError, NonFiniteError, RunDirectoryError
from asyncrl.training.agreement import disagreement
from tests.run.jobs import Engines, Executor, Trainer, a_job, started

pytestmark = pytest.mark.anyio


async def test_each_of_several_trainers_gathers_and_commits_under_its_name() -> None:
    calls: list[str] = []
    async with started(Engines(calls), Executor(calls), Trainer(calls), trainer_name="critic") as run:
        calls.clear()
        await run.next_batch(3)
        await run.commit(3)
    assert calls == ["engines.prepare_rollout 3", "executor.get 3 critic", "executor.commit 3 critic"]


async def test_a_run_of_which_nothing_says_how_long_it_is_is_refused_before_anything_begins() -> None:
    calls: list[str] = []
    for per_epoch in (None, 0):
        job = a_job(train={"num_steps": None})
        with pytest.raises(BaseExceptionGroup) as raised:
            async with started(Engines(calls), Executor(calls), Trainer(calls), job=job, per_epoch=per_epoch):
                pass
        match = rf"train\.num_steps: .*num_rollout_per_epoch is {per_epoch}: .* set train\.num_steps, or"
        assert raised.group_contains(ConfigError, match=match)
    assert calls == []


async def test_a_loop_that_generates_nothing_ahead_tells_that_its_bound_on_staleness_is_not_used() -> None:
    for ahead, told in ((False, 1), (True, 0)):
        job = a_job(rollout={"max_staleness": 3})
        async with started(Engines([]), Executor([]), Trainer([]), job=job, generates_ahead=ahead):
            assert sum("max_staleness = 3 has no effect" in note for note in job.record.notes) == told


async def test_a_run_knows_its_first_and_its_last_step() -> None:
    job = a_job(train={"num_steps": None, "num_epochs": 3})
    async with started(Engines([]), Executor([]), Trainer([], resumed_at=4), job=job, per_epoch=2) as run:
        assert list(run.steps()) == [4, 5] and job.record.started == (6, 4)


async def test_no_step_begins_after_a_stop_was_asked_for() -> None:
    async with started(Engines([]), Executor([]), Trainer([])) as run:
        steps = run.steps()
        assert next(steps) == 0
        run.job.stop.request()
        assert list(steps) == []


@pytest.mark.parametrize(("ahead", "bound", "threads"), [(False, 3, 2), (True, 0, 2), (True, 1, 1)])
async def test_a_trainer_leaves_cores_only_to_engines_that_generate_meanwhile(
    ahead: bool, bound: int, threads: int
) -> None:
    trainer, job = Trainer([]), a_job(rollout={"max_staleness": bound})
    async with started(Engines([]), Executor([]), trainer, job=job, generates_ahead=ahead):
        assert trainer.threads == threads


@pytest.mark.parametrize("colocated", [True, False])
async def test_an_export_brings_the_trainer_back_first(colocated: bool) -> None:
    calls: list[str] = []
    job = a_job(colocated=colocated)
    async with started(Engines(calls), Executor(calls), Trainer(calls), job=job) as run:
        calls.clear()
        await run.export()
    turn = ["executor.engines_paused", "engines.offload", "trainer.onload"] if colocated else []
    assert calls == [*turn, "trainer.export_hf DIR"] and job.record.exports == ["DIR"]


async def test_without_a_trainer_nothing_is_exported() -> None:
    calls: list[str] = []
    job = a_job(debug={"rollout_only": True})
    async with started(Engines(calls), Executor(calls), Trainer(calls), job=job) as run:
        await run.export()
    assert "trainer.export_hf DIR" not in calls and job.record.exports == []


async def test_a_job_that_is_stopped_before_its_first_step_exports_no_model_as_if_trained() -> None:
    calls: list[str] = []
    job = a_job(eval={"data": {"source": "held_out.jsonl"}}, checkpoint={"every": 1})
    async with started(Engines(calls), Executor(calls), Trainer(calls), job=job) as run:
        calls.clear()
        job.stop.request()
        assert list(run.steps()) == []
        await run.finish()
    assert calls == [] and job.record.exports == []
    assert job.record.notes == ["stopped before the first step: nothing was trained, so nothing is exported"]


async def test_a_resumed_job_that_is_stopped_before_its_next_step_exports_what_was_trained() -> None:
    job = a_job()
    async with started(Engines([]), Executor([]), Trainer([], resumed_at=4), job=job) as run:
        job.stop.request()
        await run.finish()
    assert job.record.exports == ["DIR"]


class Overwriting:
    """The directory of a job that overwrites a run, which `erase` erases."""

    attempt = 0

    def __init__(self, erase: Callable[[], str] = str, problem: str = "") -> None:
        self.let_go, self.erase_former, self._problem = 0, erase, problem

    def let_former_go(self) -> bool:
        self.let_go += 1
        if self._problem:
            raise RunDirectoryError(self._problem)
        return True


@pytest.mark.parametrize("first", ["commit", "record_step"])
async def test_a_run_that_is_overwritten_is_given_up_with_the_first_step_that_was_trained(first: str) -> None:
    job = a_job(train={"num_steps": 1})
    job.directory = Overwriting()
    async with started(Engines([]), Executor([]), Trainer([]), job=job) as run:
        await run.train(0, await run.next_batch(0))
        assert job.directory.let_go == 0
        for _ in range(2):
            if first == "commit":
                await run.commit(0)
            else:
                run.record_step(0, {})
            assert job.directory.let_go == 1


async def test_no_step_and_no_end_waits_until_a_run_that_is_overwritten_is_erased() -> None:
    job, hanging = a_job(), threading.Event()
    job.directory = Overwriting(lambda: str(hanging.wait(20)))
    try:
        with anyio.fail_after(5):
            async with started(Engines([]), Executor([]), Trainer([]), job=job) as run:
                await run.commit(0)
                (task,) = [task for task in run.statistics().background if "overwritten" in task.name]
                assert task.name == "erasure of a run that was overwritten"
                await run.commit(1)
    finally:
        hanging.set()


@pytest.mark.parametrize("problem", ["", "run.dir: it stays"])
async def test_a_run_that_is_overwritten_and_resists_is_told_and_ends_no_job(problem: str) -> None:
    job, told, heard = a_job(), [], anyio.Event()
    job.events.emit = lambda event: (told.append(event), heard.set())
    job.directory = Overwriting(lambda: "some of it is left", problem)
    async with started(Engines([]), Executor([]), Trainer([]), job=job) as run:
        await run.commit(0)
        with anyio.fail_after(5):
            await heard.wait()
    left = problem or "some of it is left"
    assert job.record.notes == [left] and [(event.component, event.what) for event in told] == [("run directory", left)]


async def test_an_evaluation_that_cannot_begin_is_a_skipped_point() -> None:
    engines = Engines([], prepare_eval=EngineError("engine-0: gone"))
    async with started(engines, Executor([]), Trainer([])) as run:
        await run.evaluate(3)
        assert run.job.record.points == [(3, None, {}, "engine-0: gone")]  # type: ignore[attr-defined]


async def test_a_step_is_recorded_with_the_publication_that_it_had() -> None:
    trainer = Trainer([], update_weights="REPORT")
    async with started(Engines([]), Executor([]), trainer) as run:
        await run.publish(0)
        run.record_step(0, {"train/loss": 1.0})
        run.record_step(1, {"train/loss": 0.5})
        assert run.job.record.recorded == [  # type: ignore[attr-defined]
            (1, None, {"train/loss": 1.0}, "REPORT"),
            (2, None, {"train/loss": 0.5}, None),
        ]


async def test_a_run_of_which_every_optimizer_step_was_skipped_did_not_succeed_and_exports_nothing() -> None:
    trainer = Trainer([], train={"train/updates": 0.0, "train/skipped_updates": 2.0})
    async with started(Engines([]), Executor([]), trainer, job=a_job(train={"num_steps": 2})) as run:
        for step in run.steps():
            await run.train(step, await run.next_batch(step))
            await run.commit(step)
        with pytest.raises(NonFiniteError, match="all 4 optimizer steps were skipped"):
            await run.finish()
        assert run.job.record.exports == []  # type: ignore[attr-defined]


async def test_a_run_of_which_some_optimizer_steps_were_skipped_ends_as_any_other() -> None:
    trainer = Trainer([], train={"train/updates": 1.0, "train/skipped_updates": 1.0})
    async with started(Engines([]), Executor([]), trainer, job=a_job(train={"num_steps": 1})) as run:
        await run.train(0, await run.next_batch(0))
        await run.commit(0)
        await run.finish()


@pytest.mark.parametrize(("mean", "largest"), [(0.02, 0.03), (1e-5, 0.5)], ids=["everywhere", "at one token"])
async def test_an_engine_that_computes_another_model_is_told_at_the_first_step_in_float32(
    mean: float, largest: float
) -> None:
    metrics = {"train/logprob_diff_mean": mean, "train/logprob_diff_max": largest}
    for dtype, told in (("float32", 1), ("bfloat16", 0)):
        job = a_job()
        job.layout.dtype = dtype
        async with started(Engines([]), Executor([]), Trainer([], train=metrics), job=job) as run:
            for step in (0, 1):
                await run.train(step, await run.next_batch(step))
        notes = [note for note in job.record.notes if "trainer and engine disagree" in note]
        assert len(notes) == told and all(note.startswith("step 1: ") for note in notes)


def test_what_rounding_explains_is_no_disagreement() -> None:
    assert disagreement({"train/logprob_diff_mean": 1e-4, "train/logprob_diff_max": 0.01}, "float32") is None
    assert disagreement({"train/policy_moved_mean": 2.0, "train/policy_moved_max": 9.0}, "float32") is None


@pytest.mark.parametrize("stages", [("checkpoint", "publish"), ("checkpoint",), ("publish",), ()])
async def test_what_a_loop_leaves_out_is_done_at_its_end(stages: tuple[str, ...]) -> None:
    """A loop without a checkpoint or a publication loses nothing of what it has trained."""
    calls: list[str] = []
    job = a_job(train={"num_steps": 2}, checkpoint={"every": 1}, run={"export": False})
    async with started(Engines(calls), Executor(calls), Trainer(calls), job=job) as run:
        for step in run.steps():
            await run.train(step, await run.next_batch(step))
            await run.commit(step)
            for stage in stages:
                await getattr(run, stage)(step)
        calls.clear()
        await run.finish()
    saved = [] if "checkpoint" in stages else ["executor.save", "trainer.save_checkpoint 1 {} wait"]
    assert calls == [*saved, *([] if "publish" in stages else ["trainer.update_weights 1"])]


async def test_what_goes_on_beside_the_loop_is_in_the_statistics_of_the_run() -> None:
    job = a_job(colocated=True)
    async with started(Engines([]), Executor([]), Trainer([]), job=job) as run:
        await run.commit(0)
        job.background.start("copy of weights 0.1", anyio.sleep_forever)
        async with run.trainers_turn():
            told = run.statistics()
        assert (told.trained, told.num_steps) == (1, 100)
        assert [task.name for task in told.background] == ["republication of lost weights", "copy of weights 0.1"]
        assert told.pauses == ("the trainer's turn on shared GPUs",)
        await job.disposal.aclose()
        assert [task.name for task in run.statistics().background] == ["copy of weights 0.1"]


async def test_an_executor_that_is_added_later_hears_of_pauses_and_of_the_weights_that_are_served() -> None:
    calls: list[str] = []
    others: list[str] = []
    async with started(Engines(calls), Executor(calls), Trainer(calls)) as run:
        run.job.pauses.serve("0.0")
        other: Any = Executor(others)
        other.name = "code"
        await run.add_executor(other)
        await run.add_executor(other)
        assert others == ["executor.set_weight_version 0.0"]
        run.job.pauses.begin("a test").end()
        assert others[1:] == ["executor.engines_paused", "executor.engines_resumed"] == calls[-2:]
