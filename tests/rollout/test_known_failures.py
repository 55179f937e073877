"""Failures that systems of this kind are known for, on the side of rollouts and data: each a behaviour of ours.

Elsewhere: a reward that hangs (test_rewards.py, test_survival.py), a function that blocks the loop and a silent
engine (observability/test_watchdog.py), uneven groups and twice the same prompt (training/test_advantages.py), an
evaluation that hangs (test_evaluator.py), kills and resumes (test_resume.py), an evaluation right after a resume
(test_whole_loops.py), temperatures (system/test_agreement.py), circuits and routers (inference/test_router.py).
"""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import torch

from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import WAITS
from asyncrl.rollout.requests.retry import RequestFault
from asyncrl.rollout.scheduling.group import GroupState
from tests.rollout.conftest import StartExecutor
from tests.rollout.fleet import eventually, let_time_out, told
from tests.rollout.test_executor import group_of, sample_of
from tests.scripted.answers import Action, scripted_engine


async def test_the_last_response_of_a_batch_that_is_swallowed_is_asked_for_again(
    start_executor: StartExecutor, events: EventLog
) -> None:
    """511 of 512 samples were there, and everybody waited for ever, and nobody could say for whom."""
    samples = 16 * 16

    def script(request: dict[str, Any], number: int) -> Action:
        return Action(fault="hang" if number == samples - 1 else None)

    rollout = {"prompts_per_step": 16, "samples_per_prompt": 16, "request_timeout_s": 60}
    async with scripted_engine(script) as engine, start_executor(engine, rollout=rollout) as executor:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(executor.get, 0)
            await engine.until(lambda e: len(e.requests) == samples and e.in_flight == 1)
            last = engine.requests[-1]["rid"]
            await eventually(lambda: [wait.subject for wait in WAITS.snapshot() if wait.what == "response"] == [last])
            let_time_out(executor)
        assert executor.last_rollout.samples == samples and executor.last_rollout.failed_attempts == 1
    assert [line["failure"] for line in told(events, "request_failed")] == ["timed_out"]


async def test_a_failed_generation_is_no_sample_of_reward_zero(start_executor: StartExecutor, events: EventLog) -> None:
    def failing(request: dict[str, Any]) -> bool:
        return (group_of(request) + sample_of(request)) % 5 == 0

    def script(request: dict[str, Any], number: int) -> Action:
        return Action(fault="status" if failing(request) else None, text="yes" if sample_of(request) % 2 else "no")

    rollout = {"samples_per_prompt": 8, "request_retries": 0}
    async with scripted_engine(script) as engine, start_executor(engine, rollout=rollout) as executor:
        batch = await executor.get(0)
        failed = {f"{g:08d}.{i:03d}" for g in range(3) for i in range(8) if (g + i) % 5 == 0}
        assert set(batch.sample_ids) == {f"{g:08d}.{i:03d}" for g in range(3) for i in range(8)} - failed
        expected = [float(int(sample_id[-3:]) % 2) for sample_id in batch.sample_ids]
        assert torch.equal(batch.rewards, torch.tensor(expected))
        assert executor.last_rollout.failed_samples == len(failed)
        assert executor.last_rollout.reward_mean == pytest.approx(sum(expected) / len(expected))
    assert {line["sample_id"] for line in told(events, "request_failed")} == failed


async def test_prompts_that_the_engine_refuses_cost_themselves_and_nobody_else(
    start_executor: StartExecutor, events: EventLog
) -> None:
    """Twenty over-long prompts once shut a whole fleet."""

    def script(request: dict[str, Any], number: int) -> Action:
        return Action(fault="refuse" if group_of(request) % 2 == 0 else None)

    async with scripted_engine(script) as engine, start_executor(engine) as executor:
        for step in range(2):
            batch = await executor.get(step)
            assert all(int(group) % 2 for group in batch.group_ids)
            await executor.commit(step)
        assert len(engine.requests) == len({request["rid"] for request in engine.requests})
        assert executor.statistics().client.failed_attempts == {RequestFault.REFUSED: 4 * 6}
    assert {line["reason"] for line in told(events, "group_dropped")} == {
        "only 0 of 4 samples usable (generation refused)"
    }


@pytest.mark.parametrize("status", [429, 503])
async def test_a_full_queue_is_back_pressure_and_costs_no_sample(start_executor: StartExecutor, status: int) -> None:
    def script(request: dict[str, Any], number: int) -> Action:
        busy = engine.in_flight >= 4
        return Action(fault="status" if busy else None, status=status, headers={"Retry-After": "0"}, latency_s=0.01)

    async with scripted_engine() as engine, start_executor(engine, rollout={"request_retries": 0}) as executor:
        engine.script = script
        batch = await executor.get(0)
        assert batch.num_samples == 12
        statistics = executor.statistics().client
        assert statistics.failed == 0 and set(statistics.failed_attempts) == {RequestFault.BUSY}


async def test_as_many_connections_as_requests_in_flight(start_executor: StartExecutor) -> None:
    """A smaller pool queues requests unseen: 1.9 times slower."""
    rollout = {"prompts_per_step": 16, "samples_per_prompt": 8, "concurrency": 128}
    async with (
        scripted_engine(lambda request, number: Action(fault="hang")) as engine,
        start_executor(engine, rollout=rollout) as executor,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(executor.get, 0)
        await engine.until(lambda e: e.in_flight == 128)
        engine.released.set()


async def test_after_a_resume_no_more_is_in_flight_than_the_bound_allows(start_executor: StartExecutor) -> None:
    """Once a fleet resumed at version 50 with 50 batches' worth of capacity, and staleness without a bound."""
    step, staleness, batch = 50, 2, 3
    rollout = {"max_staleness": staleness}
    async with scripted_engine() as engine, start_executor(engine, rollout=rollout) as executor:
        engine.version = f"0.{step}"
        executor.set_weight_version(engine.version)
        executor.generate_ahead(step, step + 10)
        await engine.until(lambda e: len(e.requests) == (staleness + 1) * batch * 4 and e.in_flight == 0)
        await executor.get(step)
        await executor.commit(step)
        await eventually(lambda: executor.statistics().groups[GroupState.FINISHED] == staleness * batch)
        files = await executor.save()
    async with scripted_engine() as engine, start_executor(engine, rollout=rollout) as executor:
        engine.version = f"1.{step + 1}"
        await executor.restore(files, step + 1)
        executor.set_weight_version(engine.version)
        engine.script = lambda request, number: Action(fault="hang")
        executor.generate_ahead(step + 1, step + 20)
        await engine.until(lambda e: e.in_flight == batch * 4)
        await anyio.wait_all_tasks_blocked()
        groups = executor.statistics().groups
        assert groups[GroupState.FINISHED] == staleness * batch, "what was saved"
        assert (
            sum(groups[state] for state in (GroupState.ADMITTED, GroupState.RUNNING, GroupState.FINISHED))
            == (staleness + 1) * batch
        )
