"""Evaluations beside the loop: what waits for what, and that each leaves one point."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest

from asyncrl.errors import EngineError, TrainerError
from asyncrl.rollout.evaluation import EvalReport
from asyncrl.run.evaluations import Evaluations
from tests.run.jobs import Engines, Executor, Trainer, a_job, started

pytestmark = pytest.mark.anyio
DATA = {"source": "x.jsonl"}


def report(step: int, *versions: str) -> EvalReport:
    return EvalReport(step, 0.5, 0.5, 1, 1, 0, 0.0, 3.0, 2.0, versions=versions or (f"0.{step}",))


class Held:
    """Evaluations that end when they are told to."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.may_end = anyio.Event()

    async def __call__(self, step: int) -> EvalReport:
        self.begun.append(step)
        await self.may_end.wait()
        return report(step)


def job_with(**settings: Any) -> Any:
    return a_job(eval={"data": DATA, "fleet": {}} | settings, train={"num_steps": 9}, run={"export": False})


async def test_steps_and_publications_go_on_while_engines_of_their_own_evaluate() -> None:
    held, calls, job = Held(), list[str](), job_with()
    async with started(Engines(calls), Executor(calls, eval=held), Trainer(calls), job=job) as run:
        assert await run.evaluate(0) is None
        for step in (0, 1, 2):
            await run.train(step, await run.next_batch(step))
            await run.commit(step)
            await run.publish(step)
        assert held.begun == [0] and job.record.points == []
        assert [task.name for task in job.background.running][1:] == ["evaluation after step 0"]
        held.may_end.set()
        await run.finish()
    steps = [
        (step, metrics["eval/weights_step"], metrics["eval/lag_steps"]) for step, _, metrics, _ in job.record.points
    ]
    assert steps == [(0, 0.0, 3.0), (3, 3.0, 0.0)], "each point names its weights, and how far training had gone"
    assert job.record.points[0][2]["eval/seconds"] == 2.0
    assert "engines.prepare_eval" not in calls, "the training engines are left alone"


@pytest.mark.parametrize("if_busy", ["wait", "skip"])
async def test_a_second_evaluation_waits_or_is_skipped_as_the_setting_says(if_busy: str) -> None:
    held, job, executor_calls = Held(), job_with(if_busy=if_busy), list[str]()
    async with started(Engines([]), Executor(executor_calls, eval=held), Trainer([]), job=job) as run:
        await run.evaluate(0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.evaluate, 1)
            await anyio.wait_all_tasks_blocked()
            assert held.begun == [0]
            held.may_end.set()
        await run.finish()
    points = [(step, skipped) for step, _, _, skipped in job.record.points]
    busy = "the evaluation after step 0 is still under way (eval.if_busy)"
    first = [(0, None), (1, None)] if if_busy == "wait" else [(1, busy), (0, None)]
    assert points == [*first, (0, None)], "the last one waited, and is of what is trained"


async def test_the_end_waits_for_the_evaluation_before_it_also_where_others_are_skipped() -> None:
    held, job = Held(), job_with(if_busy="skip")
    async with started(Engines([]), Executor([], eval=held), Trainer([]), job=job) as run:
        await run.evaluate(0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.finish)
            await anyio.wait_all_tasks_blocked()
            assert held.begun == [0]
            held.may_end.set()
    assert [skipped for *_, skipped in job.record.points] == [None, None]


@pytest.mark.parametrize("fails", ["save_checkpoint", "update_weights", "export_hf"])
async def test_an_end_that_fails_loses_no_evaluation_under_way(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def disk_is_full(*_: Any, **__: Any) -> None:
        raise TrainerError("the disk is full")

    held, trainer = Held(), Trainer([])
    job = a_job(eval={"data": DATA, "fleet": {}, "at_end": False}, train={"num_steps": 1}, checkpoint={"every": 5})
    async with started(Engines([]), Executor([], eval=held), trainer, job=job) as run:
        await run.evaluate(0)
        await run.train(0, await run.next_batch(0))
        await run.commit(0)
        monkeypatch.setattr(trainer, fails, disk_is_full, raising=False)
        async with anyio.create_task_group() as tasks:

            async def finish() -> None:
                with pytest.raises(TrainerError, match="the disk is full"):
                    await run.finish()
                await job.disposal.aclose()

            tasks.start_soon(finish)
            await anyio.wait_all_tasks_blocked()
            held.may_end.set()
    assert [(step, skipped) for step, _, _, skipped in job.record.points] == [(0, None)]


async def test_an_evaluation_that_the_end_of_the_job_cuts_short_is_a_skipped_point() -> None:
    held, job = Held(), job_with()
    async with started(Engines([]), Executor([], eval=held), Trainer([]), job=job) as run:
        await run.evaluate(0)
        await anyio.wait_all_tasks_blocked()
        await job.disposal.aclose()
    assert job.record.points == [(0, None, {}, "the job ended before it did")]


async def test_an_evaluation_beside_the_loop_that_fails_is_a_skipped_point() -> None:
    async def fails(step: int) -> EvalReport:
        raise EngineError("eval-0 holds weights '0.1'")

    job = job_with()
    async with started(Engines([]), Executor([], eval=fails), Trainer([]), job=job) as run:
        await run.evaluate(0)
        await run.finish()
    assert [skipped for *_, skipped in job.record.points] == ["eval-0 holds weights '0.1'"] * 2


async def test_on_the_training_engines_the_loop_waits_and_gets_the_point() -> None:
    calls: list[str] = []
    job = a_job(eval={"data": DATA})
    async with started(Engines(calls), Executor(calls, eval=report(3)), Trainer(calls), job=job) as run:
        calls.clear()
        assert await run.evaluate(3) == report(3)
    assert calls == ["engines.prepare_eval", "executor.eval 3"]


async def test_an_evaluation_that_mixes_weights_says_which() -> None:
    job = a_job(eval={"data": DATA})
    mixed: Callable[[int], Awaitable[EvalReport]] | EvalReport = report(3, "0.2", "0.3")
    async with started(Engines([]), Executor([], eval=mixed), Trainer([]), job=job) as run:
        await run.evaluate(3)
    assert any("after step 3 mixes weights 0.2, 0.3" in note for note in job.record.notes)
    assert "eval/weights_step" not in job.record.points[0][2]


async def test_a_directory_can_be_evaluated_from_a_loop() -> None:
    calls: list[str] = []
    job = job_with()
    async with started(Engines(calls), Executor(calls, eval=replace(report(3))), Trainer(calls), job=job) as run:
        await run.evaluate(3, "DIR")  # type: ignore[arg-type]
        await run._evaluations.finish()
    assert job.record.points == [], "it is not this run's policy"
    assert "evaluation of DIR: accuracy 0.5, mean_reward 0.5," in job.record.notes[-1]
    assert "executor.eval 3 DIR" in calls and isinstance(run._evaluations, Evaluations)
