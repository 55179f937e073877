"""One executor for several trainers, and one router for several executors."""

from __future__ import annotations

import math
import os
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from asyncrl.config import Config
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.errors import ConfigError, RolloutError
from asyncrl.host import EngineHost
from asyncrl.observability.events import EventLog
from asyncrl.observability.report import build_report
from asyncrl.observability.waits import WAITS
from asyncrl.rollout.executor import RolloutExecutor
from asyncrl.rollout.scheduling.group import GroupState
from tests.rollout.conftest import StartExecutor
from tests.rollout.fleet import deadlines
from tests.rollout.test_executor import group_of
from tests.scripted.answers import Action, scripted_engine

SHARED = {"rollout": {"prompts_per_step": 3, "samples_per_prompt": 2, "max_new_tokens": 8, "max_staleness": 2}}


async def test_an_actor_and_its_critic_train_the_same_batches_each_at_its_own_pace(
    start_executor: StartExecutor, events: EventLog
) -> None:
    trained: dict[str, list[tuple[str, ...]]] = {"actor": [], "critic": []}
    async with scripted_engine() as engine, start_executor(engine, trainers=("actor", "critic"), **SHARED) as executor:
        engine.version = "0.0"
        executor.set_weight_version("0.0")
        executor.generate_ahead(0, 3)

        async def train(trainer: str) -> None:
            for step in range(3):
                batch = await executor.get(step, trainer)
                trained[trainer].append(batch.group_ids)
                await anyio.lowlevel.checkpoint()
                await executor.commit(step, trainer)

        async with anyio.create_task_group() as tasks:  # both ask for the first batch before it is there
            tasks.start_soon(train, "actor")
            tasks.start_soon(train, "critic")
        assert trained["actor"] == trained["critic"] and len(set(trained["actor"])) == 3
        with pytest.raises(RolloutError, match="rollout 2 was already committed"):
            await executor.get(2, "critic")
        groups = executor.statistics().groups
        assert groups[GroupState.TRAINED] == 9 and sum(groups.values()) == 9
    told = [event for event in events.recent if event["kind"] == "groups_trained"]
    assert [event["rollout_id"] for event in told] == [0, 1, 2]


async def test_a_batch_that_is_there_does_not_wait_for_the_one_after_it(start_executor: StartExecutor) -> None:
    async with (
        scripted_engine(lambda request, number: Action(fault="hang" if group_of(request) >= 3 else None)) as engine,
        start_executor(engine, trainers=("actor", "critic"), **SHARED) as executor,
    ):
        engine.version = "0.0"
        executor.set_weight_version("0.0")
        batch = await executor.get(0, "actor")
        await executor.commit(0, "actor")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(executor.get, 1, "actor")
            await engine.until(lambda e: e.in_flight == 6)
            with anyio.fail_after(5):
                assert (await executor.get(0, "critic")) is batch
            engine.released.set()


async def test_a_batch_is_trained_and_may_be_saved_when_the_slowest_trainer_is_done(
    start_executor: StartExecutor,
) -> None:
    async with scripted_engine() as engine, start_executor(engine, trainers=("actor", "critic"), **SHARED) as executor:
        engine.version = "0.0"
        executor.set_weight_version("0.0")
        for step in range(2):
            await executor.get(step, "actor")
            await executor.commit(step, "actor")
        with pytest.raises(RolloutError, match="rollout 0 was delivered and not committed"):
            await executor.save()
        for step in range(2):
            assert (await executor.get(step, "critic")).rollout_id == step
            await executor.commit(step, "critic")
        assert await executor.save()


async def test_whoever_gives_up_waiting_leaves_the_batch_to_the_others(start_executor: StartExecutor) -> None:
    async with (
        scripted_engine(lambda request, number: Action(fault="hang")) as engine,
        start_executor(engine, trainers=("actor", "critic"), **SHARED) as executor,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(executor.get, 0, "actor")
            await engine.until(lambda e: len(e.requests) == 6)
            tasks.start_soon(executor.get, 0, "critic")
            await anyio.wait_all_tasks_blocked()
            shared = [wait.subject for wait in WAITS.snapshot() if wait.what == "shared batch"]
            assert shared == ["rollout 0, for actor", "rollout 0, for critic"]
            tasks.cancel_scope.cancel()
        engine.released.set()
        batch = await executor.get(0, "critic")
        assert (await executor.get(0, "actor")) is batch


async def test_executors_that_share_a_router_never_use_the_same_ids_or_routing_keys(
    start_executor: StartExecutor,
) -> None:
    sticky = {**SHARED, "router": {"sticky": "group"}}
    async with (
        scripted_engine() as engine,
        start_executor(engine, **sticky) as one,
        start_executor(engine, **sticky) as other,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(one.get, 0)
        tasks.start_soon(other.get, 0)
    ids = [request["rid"] for request in engine.requests]
    assert len(ids) == len(set(ids)) == 12
    assert not any(a != b and b.startswith(a) for a in ids for b in ids), "an engine aborts by prefix"
    assert len(set(engine.routing_keys)) == 6, "three groups of each executor"


async def test_another_executor_that_its_loop_tells_of_an_update_loses_nothing_to_it(
    start_executor: StartExecutor,
) -> None:
    """In the order that the README gives."""
    update = {**SHARED, "weights": {"on_update": "in_place"}}
    update["rollout"] = {**SHARED["rollout"], "request_timeout_s": 20, "request_retries": 0}
    async with (
        scripted_engine(lambda request, number: Action(fault="hang" if number < 6 else None)) as engine,
        start_executor(engine, **update) as other,
    ):
        engine.version = "0.0"
        other.set_weight_version("0.0")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.get, 0)
            await engine.until(lambda e: e.in_flight == 6)
            async with other.updating():
                other.engines_paused()
                try:
                    await anyio.wait_all_tasks_blocked()
                    assert deadlines(other) == {math.inf}, "the publication may take as long as it will"
                    engine.version = "0.1"
                finally:
                    other.engines_resumed()
            other.set_weight_version(engine.version)
            engine.released.set()
        await other.commit(0)
        assert other.statistics().client.failed_attempts == {}
        assert (await other.get(1)).versions[0][-1].version == "0.1"
        assert other.last_rollout.staleness_max == 0


async def test_executors_of_one_job_have_reward_workers_of_their_own(
    start_executor: StartExecutor, tmp_path: Path
) -> None:
    workers = {**SHARED, "reward": {"function": "tests.rollout.reward_functions:good", "workers": 1}}
    async with (
        EngineHost.start(tmp_path) as host,
        scripted_engine() as engine,
        start_executor(engine, host=host, name="one", **workers) as one,
        start_executor(engine, host=host, name="other", **workers) as other,
    ):
        await one.get(0)
        await other.get(0)
    assert {"one-reward-worker-0.log", "other-reward-worker-0.log"} <= set(os.listdir(tmp_path))


async def test_executors_with_names_are_told_apart_in_ids_events_report_and_files(
    start_executor: StartExecutor, prompts: Path, events: EventLog
) -> None:
    settings = {**SHARED, "eval": {"data": {"source": str(prompts)}}}
    async with (
        scripted_engine() as engine,
        start_executor(engine, **settings) as one,
        start_executor(engine, name="code", **settings) as other,
    ):
        for executor in (one, other):
            await executor.get(0)
            await executor.commit(0)
            await executor.eval(1)
    ended = [event for event in events.recent if event["kind"] == "groups_trained"]
    assert [list(event["group_ids"]) for event in ended] == [
        ["00000000", "00000001", "00000002"],
        ["code-00000000", "code-00000001", "code-00000002"],
    ]
    assert [event["executor"] for event in events.recent if event["kind"] == "evaluated"] == ["", "code"]
    rids = [request["rid"] for request in engine.requests]
    assert len(set(rids)) == len(rids) == 2 * (6 + 40) and sum("-code-" in rid for rid in rids) == 46
    report = build_report(events.recent, ())
    assert (report.groups["trained"], report.groups["trained (code)"]) == (3, 3)


async def test_an_executor_with_a_name_goes_on_under_it(start_executor: StartExecutor, events: EventLog) -> None:
    async with scripted_engine() as engine:
        async with start_executor(engine, name="code", **SHARED) as executor:
            await executor.get(0)
            await executor.commit(0)
            files = await executor.save()
        async with start_executor(engine, name="code", **SHARED) as executor:
            reached = await executor.restore(files, 1)
            assert reached.had_ended("code-00000002") and not reached.had_ended("code-00000003")
            assert (await executor.get(1)).group_ids == ("code-00000003", "code-00000004", "code-00000005")


@pytest.mark.parametrize("name", ["a-b", "a.b", "1st", "é", "a b"])
def test_a_name_that_ids_could_not_bear_is_refused(tokenizer: PolicyTokenizer, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits and underscores"):
        RolloutExecutor(
            Config(), router_url="", host=None, events=EventLog(None), tokenizer=tokenizer, log_dir=tmp_path, name=name
        )
