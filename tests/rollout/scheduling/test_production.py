"""Generation ahead of the trainer: what is begun, what is delivered, and what becomes of everything else."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from blockbuster import blockbuster_ctx

from asyncrl.data.sample import SampleGroup
from asyncrl.data.staleness import Bound
from asyncrl.errors import ConfigError, RewardError, RolloutError
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import WAITS
from asyncrl.rollout.executor import RolloutExecutor
from asyncrl.rollout.scheduling.group import GroupState
from tests.rollout.conftest import StartExecutor
from tests.rollout.fleet import eventually
from tests.rollout.test_executor import group_of, sample_of
from tests.scripted.answers import Action, AnsweringEngine, scripted_engine

MODULE = "tests.rollout.scheduling.test_production"


def varied(request: dict[str, Any], number: int) -> Action:
    return Action(text="yes" if sample_of(request) % 2 else "no")


def publish(engine: AnsweringEngine, executor: RolloutExecutor, step: int) -> None:
    engine.version = f"0.{step}"
    executor.set_weight_version(engine.version)


def states(executor: RolloutExecutor) -> dict[str, int]:
    return {state.value: count for state, count in executor.statistics().groups.items() if count}


async def test_as_much_is_generated_ahead_as_the_weights_allow_and_no_more(start_executor: StartExecutor) -> None:
    async with scripted_engine() as engine, start_executor(engine, rollout={"max_staleness": 1}) as executor:
        publish(engine, executor, 0)
        executor.generate_ahead(0, 3)
        await engine.until(lambda e: len(e.requests) == 2 * 12)  # nobody asked
        await eventually(lambda: states(executor) == {"finished": 6})  # a batch takes what is finished
        batch = await executor.get(0)
        assert batch.group_ids == ("00000000", "00000001", "00000002")
        await executor.commit(0)
        assert executor.statistics().groups[GroupState.ADMITTED] == 0, "the weights allow no more than two batches"
        publish(engine, executor, 1)
        await executor.get(1)
        assert executor.last_rollout.staleness_max == 1 and executor.last_rollout.off_version_fraction == 1
        await executor.commit(1)
        await engine.until(lambda e: len(e.requests) == 3 * 12 and e.in_flight == 0)
        publish(engine, executor, 2)
        assert (await executor.get(2)).versions[0][0].version == "0.1"
        await executor.commit(2)
        assert states(executor) == {"trained": 9} and len(engine.requests) == 3 * 12, "three were asked for in all"


async def test_groups_are_admitted_as_slots_become_free(start_executor: StartExecutor) -> None:
    hang = Action(fault="hang")
    async with (
        scripted_engine(lambda request, number: hang) as engine,
        start_executor(engine, rollout={"max_staleness": 300, "concurrency": 6}) as executor,
    ):
        publish(engine, executor, 0)
        executor.generate_ahead(0, 1000)
        await engine.until(lambda e: e.in_flight == 6)
        await anyio.wait_all_tasks_blocked()
        assert states(executor) == {"running": 2, "admitted": 2}, "no more than could take all slots"


async def test_who_waits_for_a_batch_can_be_cancelled_while_something_happens_in_every_turn_of_the_loop(
    start_executor: StartExecutor,
) -> None:
    hang = Action(fault="hang")
    async with scripted_engine(lambda request, number: hang) as engine, start_executor(engine) as executor:
        began = anyio.current_time()

        async def something_happens() -> None:
            while anyio.current_time() < began + 2:
                executor._started.production._changes.notify()
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(something_happens)
            with anyio.move_on_after(0.1):
                await executor.get(0)
            assert anyio.current_time() < began + 1
            tasks.cancel_scope.cancel()


async def test_who_takes_batches_that_are_there_already_can_be_cancelled(start_executor: StartExecutor) -> None:
    async with scripted_engine() as engine, start_executor(engine, rollout={"max_staleness": 20}) as executor:
        publish(engine, executor, 0)
        executor.generate_ahead(0, 20)
        await eventually(lambda: states(executor) == {"finished": 60})
        with anyio.CancelScope() as scope:
            scope.cancel()
            for step in range(20):
                await executor.get(step)
                await executor.commit(step)
        assert scope.cancelled_caught and states(executor) == {"finished": 60}


async def test_without_it_nothing_is_generated_unless_asked_for(start_executor: StartExecutor) -> None:
    async with scripted_engine() as engine, start_executor(engine, rollout={"max_staleness": 3}) as executor:
        publish(engine, executor, 0)
        await executor.get(0)
        await executor.commit(0)
        publish(engine, executor, 1)
        await anyio.wait_all_tasks_blocked()
        assert states(executor) == {"trained": 3} and len(engine.requests) == 12


async def test_a_batch_that_the_published_weights_are_too_old_for_is_refused(start_executor: StartExecutor) -> None:
    async with scripted_engine() as engine, start_executor(engine) as executor:
        publish(engine, executor, 0)
        await executor.get(0)
        with pytest.raises(RolloutError, match=r"step 1 - 0 = 1 or newer, and those of step 0 are published; publish"):
            await executor.get(1)
        publish(engine, executor, 1)
        await executor.get(1)


@pytest.mark.parametrize("oversample", [0, 2])
@pytest.mark.parametrize(
    ("staleness", "interval", "minibatches", "epochs"),
    [(0, 1, 1, 1), (3, 1, 1, 1), (2, 3, 1, 1), (7, 2, 2, 1), (11, 2, 2, 2)],
)
async def test_through_faults_every_group_is_trained_once_within_the_bound(
    start_executor: StartExecutor,
    events: EventLog,
    staleness: int,
    interval: int,
    minibatches: int,
    epochs: int,
    oversample: int,
) -> None:
    dice, faults = random.Random(staleness), ["status", "drop", "truncate", "garbage", "abort"]

    def script(request: dict[str, Any], number: int) -> Action:
        fault = dice.choice(faults) if dice.random() < 0.1 else None
        text = dice.choice(["yes", "no"]) if group_of(request) % 4 else "yes"
        oldest = begun.setdefault(group_of(request), published)
        spans = ((f"0.{oldest}", 0, 1), (f"0.{published}", 1, 3))
        return Action(fault=fault, latency_s=dice.expovariate(200), text=text, versions=spans)  # type: ignore[arg-type]

    published, steps, bound = 0, 9, Bound(staleness, minibatches * epochs)
    begun: dict[int, int] = {}
    """Step of the weights when a group's first request came."""
    rollout = {
        "max_staleness": staleness,
        "request_retries": 20,
        "filters": ("zero_variance",),
        "oversample": oversample,
        "concurrency": 16,
    }
    train = {"update_weights_interval": interval, "minibatches": minibatches, "batch_epochs": epochs}
    with blockbuster_ctx("asyncrl"):
        async with scripted_engine(script) as engine, start_executor(engine, rollout=rollout, train=train) as executor:
            publish(engine, executor, 0)
            executor.generate_ahead(0, steps)
            for step in range(steps):
                batch = await executor.get(step)
                bound.check(batch)
                assert executor.last_rollout.staleness_max <= staleness
                await executor.commit(step)
                if (step + 1) % interval == 0:
                    published = step + 1
                    publish(engine, executor, published)
        assert WAITS.snapshot() == ()
    admitted = [line["group_id"] for line in events.recent if line["kind"] == "group_admitted"]
    trained = [group for line in events.recent if line["kind"] == "groups_trained" for group in line["group_ids"]]
    out = [line["group_id"] for line in events.recent if line["kind"] in ("group_filtered", "group_dropped")]
    assert len(trained) == steps * 3 and Counter(trained + out) == Counter(admitted)
    assert any(line["kind"] == "group_filtered" for line in events.recent)
    if not oversample:
        assert [line for line in events.recent if line["kind"] == "group_dropped"] == []


async def test_a_straggler_is_waited_for_at_its_deadline(start_executor: StartExecutor) -> None:
    def script(request: dict[str, Any], number: int) -> Action:
        return Action(fault="hang" if group_of(request) == 0 else None, versions=(("0.0", 0, 3),))

    async with scripted_engine(script) as engine, start_executor(engine, rollout={"max_staleness": 1}) as executor:
        publish(engine, executor, 0)
        executor.generate_ahead(0, 2)
        assert "00000000" not in (await executor.get(0)).group_ids, "it has until the next batch"
        await executor.commit(0)
        publish(engine, executor, 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(executor.get, 1)
            await anyio.wait_all_tasks_blocked()
            [wait] = [wait for wait in WAITS.snapshot() if wait.what == "batch"]
            assert wait.subject == "1 more groups, the oldest: 00000000"
            engine.released.set()
        await executor.commit(1)
        assert states(executor) == {"trained": 6}


async def test_a_straggler_is_issued_again_at_its_deadline(start_executor: StartExecutor, events: EventLog) -> None:
    def script(request: dict[str, Any], number: int) -> Action:
        return Action(fault="hang" if "-00000000." in request["rid"] else None)

    rollout = {"max_staleness": 1, "straggler": "reissue"}
    async with scripted_engine(script) as engine, start_executor(engine, rollout=rollout) as executor:
        publish(engine, executor, 0)
        executor.generate_ahead(0, 3)
        assert "00000000" not in (await executor.get(0)).group_ids
        await executor.commit(0)
        publish(engine, executor, 1)
        await executor.get(1)
        assert executor.last_rollout.reissued_groups == 1
        await engine.until(lambda e: e.in_flight == 0)
        await executor.commit(1)
        publish(engine, executor, 2)
        assert "00000000r1" in (await executor.get(2)).group_ids
        await executor.commit(2)
        assert states(executor) == {"trained": 9, "dropped": 1}
    prompts = {line["group_id"]: line["prompt_id"] for line in events.recent if line["kind"] == "group_admitted"}
    assert prompts["00000000"] == prompts["00000000r1"]


async def test_surplus_that_no_batch_has_room_for_is_dropped_and_its_requests_end(
    start_executor: StartExecutor, events: EventLog
) -> None:
    def script(request: dict[str, Any], number: int) -> Action:
        return Action(fault="hang" if group_of(request) in (1, 3) else None)

    async with scripted_engine(script) as engine, start_executor(engine, rollout={"oversample": 2}) as executor:
        publish(engine, executor, 0)
        batch = await executor.get(0)
        assert batch.group_ids == ("00000000", "00000002", "00000004")
        assert executor.last_rollout.surplus_groups == 2
        await engine.until(lambda e: e.in_flight == 0)
        await executor.commit(0)
        assert states(executor) == {"trained": 3, "dropped": 2}
    dropped = [line["reason"] for line in events.recent if line["kind"] == "group_dropped"]
    assert dropped == ["surplus: no batch had room for it before it was too old"] * 2


async def test_groups_of_weights_older_than_published_are_issued_again_and_end_the_run_if_it_goes_on(
    start_executor: StartExecutor,
) -> None:
    def script(request: dict[str, Any], number: int) -> Action:
        return Action(versions=(("0.4" if "r1." not in request["rid"] else "0.5", 0, 3),))

    async with scripted_engine(script) as engine, start_executor(engine) as executor:
        for step in (0, 4, 5):
            publish(engine, executor, step)
        batch = await executor.get(5)
        # In the order in which the first attempts ended.
        assert sorted(batch.group_ids) == ["00000000r1", "00000001r1", "00000002r1"]
        assert executor.last_rollout.reissued_groups == 3
        engine.script = lambda request, number: Action(versions=(("0.0", 0, 3),))
        publish(engine, executor, 6)
        with pytest.raises(RolloutError, match=r"9 prompt groups failed .*too old for every batch.*weights of step 0"):
            await executor.get(6)


# filters


async def test_filtered_groups_are_replaced_and_counted(start_executor: StartExecutor, events: EventLog) -> None:
    def script(request: dict[str, Any], number: int) -> Action:
        return Action() if group_of(request) % 2 else varied(request, number)

    filters = {"filters": ("zero_variance", f"{MODULE}:not_the_second")}
    async with scripted_engine(script) as engine, start_executor(engine, rollout=filters) as executor:
        batch = await executor.get(0)
        assert batch.group_ids == ("00000000", "00000004", "00000006")
        assert executor.last_rollout.filtered_groups == 4 and executor.last_rollout.zero_variance_groups == 0
        assert executor.statistics().drop_reasons == {"all rewards are equal": 3, "it is the second": 1}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", r"rollout.filters: .*:fails failed on group 0000000\d: KeyError: 'no'"),
        ("says_true", r"rollout.filters: .*:says_true returned True for group 0000000\d; it must return None to keep"),
    ],
)
async def test_a_filter_that_fails_ends_the_run_with_its_name(
    start_executor: StartExecutor, name: str, message: str
) -> None:
    rollout = {"filters": (f"{MODULE}:{name}",)}
    async with scripted_engine() as engine, start_executor(engine, rollout=rollout) as executor:
        with pytest.raises(RolloutError, match=message):
            await executor.get(0)
        groups = executor.statistics().groups
        assert groups[GroupState.DROPPED] == sum(groups.values()) == 3


async def test_filters_that_leave_nothing_end_the_run(start_executor: StartExecutor) -> None:
    rollout = {"filters": ("zero_variance",), "samples_per_prompt": 2}
    async with scripted_engine() as engine, start_executor(engine, rollout=rollout) as executor:
        with pytest.raises(RolloutError, match=r"took out 97 prompt groups while a batch of 3 .*all rewards are equal"):
            await executor.get(0)


async def test_a_filter_that_does_not_import_is_refused_at_the_start(start_executor: StartExecutor) -> None:
    async with scripted_engine() as engine:
        with pytest.raises(ExceptionGroup) as error:
            async with start_executor(engine, rollout={"filters": (f"{MODULE}:nothing",)}):
                pass
        assert error.group_contains(ConfigError, match="rollout.filters: .* has no 'nothing'")


def not_the_second(group: SampleGroup) -> str | None:
    return "it is the second" if group.group_id == "00000002" else None


def fails(group: SampleGroup) -> str | None:
    raise KeyError("no")


def says_true(group: SampleGroup) -> bool:
    return True


# failures and ends


async def test_a_failure_while_nobody_waits_is_raised_by_the_next_get(start_executor: StartExecutor) -> None:
    sections = {
        "rollout": {"max_staleness": 1},
        "reward": {"function": "tests.rollout.reward_functions:raises", "workers": 0},
    }
    async with scripted_engine() as engine, start_executor(engine, **sections) as executor:
        publish(engine, executor, 0)
        executor.generate_ahead(0, 9)
        await engine.until(lambda e: len(e.requests) >= 7 and e.in_flight == 0)
        with pytest.raises(RewardError, match="failed on 7 of the first 12 samples"):
            await executor.get(0)
        assert states(executor).keys() == {"dropped"}


async def test_a_group_that_is_dropped_before_its_task_began_asks_for_nothing(start_executor: StartExecutor) -> None:
    async with scripted_engine() as engine, start_executor(engine) as executor:
        publish(engine, executor, 0)

        async def fail() -> None:
            assert states(executor) == {"admitted": 3}, "admitted in this turn of the loop; their tasks have the next"
            executor._started.production.fail(RolloutError("it has to end"))

        await anyio.wait_all_tasks_blocked()
        async with anyio.create_task_group() as tasks:
            executor.generate_ahead(0, 1)
            tasks.start_soon(fail)
        with pytest.raises(RolloutError, match="it has to end"):
            await executor.get(0)
        assert (await executor.get(0)).group_ids == ("00000003", "00000004", "00000005")
        assert {group_of(request) for request in engine.requests} == {3, 4, 5}


async def test_what_is_under_way_at_the_end_is_dropped_and_its_requests_end(start_executor: StartExecutor) -> None:
    hang = Action(fault="hang")
    async with scripted_engine(lambda request, number: hang if group_of(request) > 1 else Action()) as engine:
        async with start_executor(engine, rollout={"max_staleness": 2}) as executor:
            publish(engine, executor, 0)
            executor.generate_ahead(0, 9)
            await engine.until(lambda e: e.in_flight == 7 * 4)
        assert states(executor) == {"dropped": 9}
        await engine.until(lambda e: e.in_flight == 0)
    assert WAITS.snapshot() == ()


# updates of the weights


async def test_with_wait_running_requests_end_before_an_update_and_nothing_is_sent_during_it(
    start_executor: StartExecutor,
) -> None:
    sections = {"rollout": {"max_staleness": 1, "concurrency": 8}, "weights": {"on_update": "wait"}}
    async with (
        scripted_engine(lambda request, number: Action(fault="hang" if number < 8 else None)) as engine,
        start_executor(engine, **sections) as executor,
    ):
        publish(engine, executor, 0)
        executor.generate_ahead(0, 2)
        await engine.until(lambda e: e.in_flight == 8)
        entered = anyio.Event()

        async def update() -> None:
            async with executor.updating():
                assert engine.in_flight == 0
                entered.set()
                await anyio.wait_all_tasks_blocked()
                assert len(engine.requests) == 8

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(update)
            await anyio.wait_all_tasks_blocked()
            assert not entered.is_set()
            engine.released.set()
        assert (await executor.get(0)).num_samples == 12


async def test_with_wait_a_request_that_does_not_end_does_not_hold_the_weights_for_ever(
    start_executor: StartExecutor,
) -> None:
    sections = {"rollout": {"request_timeout_s": 0.3, "max_staleness": 1}, "weights": {"on_update": "wait"}}
    async with (
        scripted_engine(lambda request, number: Action(fault="hang")) as engine,
        start_executor(engine, **sections) as executor,
    ):
        publish(engine, executor, 0)
        executor.generate_ahead(0, 2)
        await engine.until(lambda e: e.in_flight == 24)
        with anyio.fail_after(5):
            async with executor.updating():
                pass


@pytest.mark.parametrize("on_update", ["in_place", "wait", "abort"])
async def test_what_is_held_back_by_an_update_has_a_name_among_the_waits(
    start_executor: StartExecutor, on_update: str
) -> None:
    async with scripted_engine() as engine, start_executor(engine, weights={"on_update": on_update}) as executor:
        async with executor.updating():
            assert [(wait.what, wait.subject, wait.deadline_s) for wait in WAITS.snapshot()] == [
                ("end of the weight update", "trainer", 5.0)
            ]
        assert WAITS.snapshot() == ()


async def test_retracted_requests_go_on_through_an_update(start_executor: StartExecutor) -> None:
    async with (
        scripted_engine(lambda request, number: Action(fault="hang")) as engine,
        start_executor(engine, rollout={"max_staleness": 1}) as executor,
    ):
        publish(engine, executor, 0)
        executor.generate_ahead(0, 2)
        await engine.until(lambda e: e.in_flight == 24)
        async with executor.updating():
            assert engine.in_flight == 24
