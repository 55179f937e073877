"""What goes wrong under an executor: the run goes on, nothing is lost or doubled, and the books say what happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.data.batch import RolloutBatch
from asyncrl.host import EngineHost
from asyncrl.observability.events import EventLog
from asyncrl.rollout.executor import RolloutExecutor
from tests.rollout.conftest import StartExecutor
from tests.rollout.fleet import eventually, fleet_of, hurry, let_time_out, told
from tests.rollout.test_executor import group_of, sample_of
from tests.scripted import Latency, hang
from tests.scripted.answers import Action, scripted_engine

STEPS = 4
BRISK = Latency(token_s=0.002)
FUNCTIONS = "tests.rollout.reward_functions"


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[EngineHost]:
    async with EngineHost.start(tmp_path) as running:
        yield running


async def run(executor: RolloutExecutor, steps: int = STEPS) -> list[RolloutBatch]:
    """So many steps; their batches."""
    batches = []
    for step in range(steps):
        batches.append(await executor.get(step))
        await executor.commit(step)
    return batches


def check_books(events: EventLog, batches: list[RolloutBatch], *, missing: int = 0) -> None:
    """Every group ended once, batches are whole but for `missing` samples in all, and no sample is in two."""
    admitted = Counter(line["group_id"] for line in told(events, "group_admitted"))
    ended = Counter(g for line in told(events, "groups_trained") for g in line["group_ids"])
    ended += Counter(line["group_id"] for line in told(events, "group_dropped"))
    assert admitted == ended and set(admitted.values()) == {1}
    assert sum(batch.num_samples for batch in batches) == 12 * len(batches) - missing
    ids = [sample_id for batch in batches for sample_id in batch.sample_ids]
    assert len(ids) == len(set(ids))


async def test_an_engine_that_dies(start_executor: StartExecutor, events: EventLog) -> None:
    rollout = {"request_retries": 20, "concurrency": 8}
    async with fleet_of(2, BRISK) as fleet:
        async with start_executor(fleet, rollout=rollout) as executor, anyio.create_task_group() as tasks:
            batches: list[RolloutBatch] = []

            async def steps() -> None:
                batches.extend(await run(executor))

            tasks.start_soon(steps)
            await eventually(lambda: fleet.engines[0].generation.running > 0)
            fleet.engines[0].kill()
            await eventually(lambda: len(told(events, "request_failed")) > 0)
            fleet.router.workers.remove(fleet.engines[0].url)  # as the controller does
        statistics = executor.statistics()
    check_books(events, batches)
    assert {line["failure"] for line in told(events, "request_failed")} <= {"server_error", "disconnected"}
    assert statistics.client.failed == 0 and sum(statistics.client.failed_attempts.values()) > 0


async def test_a_response_that_never_comes(start_executor: StartExecutor, events: EventLog) -> None:
    async with fleet_of(2, BRISK) as fleet:
        fleet.engines[1].script(hang("generate", nth=6))
        async with start_executor(fleet, rollout={"request_timeout_s": 60}) as executor:
            async with anyio.create_task_group() as tasks:
                batches: list[RolloutBatch] = []

                async def steps() -> None:
                    batches.extend(await run(executor, 1))

                tasks.start_soon(steps)
                await eventually(lambda: executor.statistics().client.completed == 11)
                let_time_out(executor)
            assert executor.last_rollout.failed_attempts == 1
            await eventually(lambda: executor.statistics().aborted_requests == 1)
    check_books(events, batches)
    [failed] = told(events, "request_failed")
    assert (failed["failure"], failed["retried"]) == ("timed_out", True)
    assert told(events, "requests_aborted")[0]["reasons"] == {"timed_out": 1}


async def test_a_reward_that_hangs(
    start_executor: StartExecutor, events: EventLog, host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, "asyncrl.rollout.rewards.pool", "00000001.002", 0.5)

    def script(request: dict[str, Any], number: int) -> Action:
        return Action(text="hang" if group_of(request) == 1 and sample_of(request) == 2 else "yes")

    reward = {"function": f"{FUNCTIONS}:endless_by_text", "timeout_s": 20, "workers": 1}
    async with scripted_engine(script) as engine, start_executor(engine, host=host, reward=reward) as executor:
        batches = await run(executor, 2)
        assert executor.statistics().reward_failures == {"the reward took longer than 20 s and was ended": 1}
    check_books(events, batches, missing=1)
    assert batches[0].num_samples == 11 and "00000001.002" not in batches[0].sample_ids
    assert [line["sample_id"] for line in told(events, "reward_failed")] == ["00000001.002"]


async def test_requests_that_the_client_gives_up(start_executor: StartExecutor, events: EventLog) -> None:
    """A straggler at its deadline: what there is of it ends in the engines, and its prompt is trained once, later."""
    async with fleet_of(1, Latency(token_s=0.001)) as fleet:
        [engine] = fleet.engines
        rollout = {"max_staleness": 1, "straggler": "reissue", "max_new_tokens": 8}
        async with start_executor(fleet, rollout=rollout) as executor:
            executor.set_weight_version("0.0")
            engine.script(hang("generate", nth=1, times=4))
            executor.generate_ahead(0, 3)
            batches = []
            for step in range(3):
                batches.append(await executor.get(step))
                await executor.commit(step)
                engine.generation.stamp(f"0.{step + 1}")
                executor.set_weight_version(f"0.{step + 1}")
            await eventually(lambda: executor.statistics().aborted_requests == 4)
    check_books(events, batches)
    [aborted] = told(events, "requests_aborted")
    assert (aborted["requests"], aborted["reasons"]) == (4, {"cancelled": 4})
    prompts = {line["group_id"]: line["prompt_id"] for line in told(events, "group_admitted")}
    again = [group for batch in batches for group in batch.group_ids if group.endswith("r1")]
    assert again and all(prompts[group] == prompts[group.removesuffix("r1")] for group in again)


async def test_a_pause_that_is_longer_than_the_deadline(start_executor: StartExecutor, events: EventLog) -> None:
    async with fleet_of(2, Latency(token_s=0.02)) as fleet:
        async with (
            start_executor(fleet, rollout={"request_timeout_s": 2.5, "request_retries": 0}) as executor,
            anyio.create_task_group() as tasks,
        ):
            batches: list[RolloutBatch] = []

            async def steps() -> None:
                batches.extend(await run(executor, 2))

            tasks.start_soon(steps)
            await eventually(lambda: fleet.running > 6)
            executor.engines_paused()
            await fleet.pause()
            await anyio.sleep(3.0)  # the pause that is meant
            fleet.go_on()
            executor.engines_resumed()
        statistics = executor.statistics()
    check_books(events, batches)
    assert statistics.client.failed_attempts == {} and statistics.aborted_requests == 0
    assert statistics.engines_paused_s > 2.5


async def test_requests_that_an_update_aborts(start_executor: StartExecutor, events: EventLog) -> None:
    sections = {"rollout": {"max_staleness": 1, "request_retries": 0}, "weights": {"on_update": "abort"}}
    async with fleet_of(2, Latency(token_s=0.6)) as fleet, start_executor(fleet, **sections) as executor:
        executor.set_weight_version("0.0")
        executor.generate_ahead(0, 2)
        await eventually(lambda: fleet.running == 24)
        await anyio.sleep(0.9)  # a token or more of eight
        async with executor.updating():
            assert fleet.running == 0, "ended by their ids, and nothing is sent before the new weights"
            known = sum(len(engine.generation.makers) for engine in fleet.engines)
            await anyio.sleep(0.5)  # longer than any pause before a new attempt
            assert fleet.running + fleet.waiting == 0
            for engine in fleet.engines:
                engine.generation.stamp("0.1")
                engine.generation._latency = BRISK
            executor.set_weight_version("0.1")
        batches = await run(executor, 2)
        statistics = executor.statistics()
    assert known == 24
    check_books(events, batches)
    for spans in (spans for batch in batches for spans in batch.versions):
        assert [span.version for span in spans] == ["0.0", "0.1"], "each goes on from what it had"
        first, last = spans
        assert first.start < first.end == last.start < last.end == first.start + 8
    made = sum(len(makers) for engine in fleet.engines for makers in engine.generation.makers.values())
    assert made == 24 * 8, "no token was made twice"
    assert statistics.client.failed == 0 and statistics.client.failed_attempts == {"aborted": 24}
    assert told(events, "requests_aborted")[0]["reasons"] == {"update of the weights": 24}


async def test_a_job_that_ends_leaves_nothing_at_work_in_engines(
    start_executor: StartExecutor, events: EventLog
) -> None:
    async with fleet_of(2, Latency(token_s=1.0)) as fleet:
        async with start_executor(fleet, rollout={"max_staleness": 1}) as executor:
            executor.set_weight_version("0.0")
            executor.generate_ahead(0, 2)
            await eventually(lambda: fleet.running == 24)
        assert fleet.running == 0
    assert told(events, "requests_aborted")[0]["requests"] == 24
