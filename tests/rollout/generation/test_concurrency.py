"""The number of requests in flight follows what engines can take: the rule, the loop around it, and its figures."""

from __future__ import annotations

import time

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncrl.config.concurrency
import asyncrl.rollout.connection
from asyncrl.config import Config
from asyncrl.config.concurrency import PER_ENGINE, concurrency_of, files_for, planned_engines
from asyncrl.observability.events import EventLog
from asyncrl.rollout.executor import RolloutExecutor
from asyncrl.rollout.generation import concurrency as concurrency_module
from asyncrl.rollout.generation.concurrency import ConcurrencyPolicy, LoadMeter, look
from asyncrl.rollout.generation.slots import Slots
from asyncrl.rollout.requests.engine_clock import EngineClock
from asyncrl.rollout.requests.engine_queries import EngineLoad, EngineQueries
from tests.rollout.conftest import StartExecutor
from tests.rollout.fleet import eventually, told
from tests.scripted.answers import Action, scripted_engine

LOADS = st.lists(
    st.builds(EngineLoad, running=st.integers(0, 512), waiting=st.integers(0, 512), token_usage=st.floats(0, 1)),
    max_size=4,
)
POLICIES = st.integers(1, 64).flatmap(
    lambda least: st.builds(ConcurrencyPolicy, least=st.just(least), most=st.integers(least, 4096))
)
IDLE = EngineLoad(running=10, waiting=0, token_usage=0.1)
BUSY = EngineLoad(running=10, waiting=100, token_usage=0.1)


@given(POLICIES, st.lists(st.tuples(st.integers(0, 5000), LOADS), max_size=50))
def test_the_limit_stays_within_its_bounds(
    policy: ConcurrencyPolicy, looks: list[tuple[int, list[EngineLoad]]]
) -> None:
    limit = policy.most
    for in_flight, loads in looks:
        before = limit
        limit, reason = policy.after(limit, in_flight, loads)
        assert policy.least <= limit <= policy.most
        if reason is None:
            assert limit >= before
            assert limit == before or in_flight >= before, "it rises only where it holds requests back"
        else:
            assert any(policy.overload(load) for load in loads)
            assert limit < before or limit == policy.least


@given(POLICIES, st.integers(0, 5000), LOADS, LOADS)
def test_more_load_never_allows_more(
    policy: ConcurrencyPolicy, in_flight: int, loads: list[EngineLoad], more: list[EngineLoad]
) -> None:
    limit = policy.most // 2 + policy.least
    lighter = policy.after(limit, in_flight, [*loads, IDLE])
    heavier = policy.after(limit, in_flight, [*loads, *more, IDLE])
    assert heavier[0] <= lighter[0]


@given(POLICIES)
def test_an_overload_that_lasts_brings_it_down_and_its_end_up_again(policy: ConcurrencyPolicy) -> None:
    limit, looks = policy.most, 0
    while limit > policy.least:
        limit, looks = policy.after(limit, limit, [BUSY])[0], looks + 1
        assert looks <= 60
    for _ in range(40):
        limit, _reason = policy.after(limit, limit, [IDLE])
    assert limit == policy.most


@given(POLICIES, st.integers(0, 5000))
def test_engines_that_say_nothing_change_nothing(policy: ConcurrencyPolicy, in_flight: int) -> None:
    assert policy.after(policy.most, in_flight, []) == (policy.most, None)


@given(slots=st.integers(8, 256), engines=st.integers(1, 4))
def test_it_settles_around_what_engines_have_slots_for(slots: int, engines: int) -> None:
    policy = ConcurrencyPolicy(least=1, most=4 * slots * engines)
    limit, seen = policy.most, []
    for _ in range(200):
        each = limit // engines
        load = EngineLoad(running=min(each, slots), waiting=max(0, each - slots), token_usage=0.5)
        limit, _ = policy.after(limit, limit, [load] * engines)
        seen.append(limit)
    capacity = slots * engines
    rise = max(1, int(policy.most * policy.increase))
    most = capacity * (1 + policy.queued) + engines * (policy.few + 1) + rise
    assert all(policy.decrease * capacity - engines - 1 <= limit <= most for limit in seen[-50:])


@given(slots=st.integers(8, 256), looks=st.integers(1, 200))
def test_a_queue_that_takes_long_to_drain_is_answered_once(slots: int, looks: int) -> None:
    """A response takes so many `looks`; what is in flight beyond a limit that was lowered only drains."""
    policy = ConcurrencyPolicy(least=1, most=4 * slots)
    limit, in_flight = policy.most, float(policy.most)
    for _ in range(1000):
        in_flight = max(in_flight - min(in_flight, slots) / looks, limit)
        load = EngineLoad(running=min(slots, int(in_flight)), waiting=max(0, int(in_flight) - slots), token_usage=0.5)
        limit, _reason = policy.after(limit, int(in_flight), [load])
        assert limit >= int(policy.decrease * slots), "slots would be free while requests wait to be sent"


async def test_an_overloaded_engine_gets_fewer_requests_and_more_once_it_recovers(
    start_executor: StartExecutor, events: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency_module, "INTERVAL_S", 0.05)
    rollout = {"adaptive_concurrency": True, "concurrency": 40, "max_staleness": 300}
    async with scripted_engine(lambda request, number: Action(latency_s=0.02)) as engine:
        engine.load, engine.version = (10, 100, 0.2), "0.0"
        async with start_executor(engine, rollout=rollout) as executor:
            executor.set_weight_version("0.0")
            executor.generate_ahead(0, 1000)
            await eventually(lambda: executor.statistics().concurrency == 4)  # one group
            await executor.get(0)
            assert executor.last_rollout.concurrency == 4
            await executor.commit(0)
            engine.script = lambda request, number: Action(fault="hang")
            executor.engines_paused()
            engine.load = (10, 0, 0.2)
            await anyio.sleep(0.2)
            assert executor.statistics().concurrency == 4, "figures of a pause count for nothing"
            executor.engines_resumed()
            await eventually(lambda: executor.statistics().concurrency > 4)
    lowered = told(events, "concurrency_lowered")
    assert lowered[0]["previous"] == 40 and lowered[0]["reason"] == "100 requests are queued behind 10"


async def test_it_is_off_unless_asked_for(start_executor: StartExecutor) -> None:
    async with scripted_engine() as engine, start_executor(engine, rollout={"concurrency": 7}) as executor:
        engine.load = (10, 100, 1.0)
        await executor.get(0)
        assert executor.statistics().concurrency == executor.last_rollout.concurrency == 7


async def test_the_queues_of_engines_are_told_with_a_batch_also_where_each_step_has_a_pause(
    start_executor: StartExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency_module, "INTERVAL_S", 0.2)
    async with scripted_engine(lambda request, number: Action(latency_s=0.02)) as engine:
        engine.load = (10, 3, 0.25)
        async with start_executor(engine, rollout={"concurrency": 7}) as executor:
            assert "rollout/engine_queue_max" not in await figures(executor, 0), "nobody has looked"
            with anyio.fail_after(20):
                rollout_id = 1
                while "rollout/engine_queue_max" not in (figured := await figures(executor, rollout_id)):
                    executor.engines_paused()
                    await anyio.sleep(0.02)
                    executor.engines_resumed()
                    rollout_id += 1
            assert {
                name: figured[f"rollout/engine_{name}"] for name in ("running_mean", "queue_max", "kv_use_max")
            } == {
                "running_mean": 10,
                "queue_max": 3,
                "kv_use_max": 0.25,
            }
            assert figured["rollout/reward_s_max"] >= figured["rollout/reward_s_mean"] > 0


async def figures(executor: RolloutExecutor, rollout_id: int) -> dict[str, float]:
    await executor.get(rollout_id)
    await executor.commit(rollout_id)
    return executor.last_rollout.as_dict()


def test_the_load_of_engines_is_that_since_the_delivery_before() -> None:
    meter = LoadMeter()
    assert meter.take() == {}
    meter.add([EngineLoad(running=4, waiting=0, token_usage=0.5), EngineLoad(running=2, waiting=6, token_usage=0.25)])
    first = meter.take()
    assert first == {
        "engine_running_mean": 3,
        "engine_queue_mean": 3,
        "engine_queue_max": 6,
        "engine_kv_use_max": 0.5,
    }
    assert meter.take() == first, "where nobody has looked since, the look before counts"
    meter.add([EngineLoad(running=1, waiting=1, token_usage=0.125)])
    assert meter.take()["engine_queue_max"] == 1


@pytest.mark.anyio
async def test_a_look_that_begins_in_the_turn_in_which_its_connection_closes_ends_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(concurrency_module, "INTERVAL_S", 0.01)
    queries, looking = EngineQueries("http://127.0.0.1:1"), anyio.CancelScope()

    async def looks() -> None:
        with looking:
            await look(
                queries,
                EngineClock(),
                LoadMeter(),
                Slots(1),
                None,
                most=lambda engines: 1,
                on_lowered=lambda event: None,
            )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(looks)
        await anyio.lowlevel.checkpoint()
        time.sleep(0.02)  # noqa: ASYNC251  # the sleep of `look` and the end of the connection come in one turn
        await anyio.lowlevel.checkpoint()
        looking.cancel()
        await queries.aclose()


@given(engines=st.integers(1, 64), own=st.none() | st.integers(1, 5000), files=st.none() | st.integers(0, 1 << 20))
def test_by_default_engines_get_what_they_take_together_within_the_open_files(
    engines: int, own: int | None, files: int | None
) -> None:
    config = Config(engine={"max_running_requests": own})  # type: ignore[arg-type]
    requests = concurrency_of(config, engines, files)
    assert 1 <= requests <= engines * (own or PER_ENGINE)
    if files is None or files_for(engines * (own or PER_ENGINE)) <= files:
        assert requests == engines * (own or PER_ENGINE)
    else:
        assert requests == 1 or files_for(requests) <= files < files_for(requests + 1)
    asked = config.model_copy(update={"rollout": config.rollout.model_copy(update={"concurrency": 7})})
    assert concurrency_of(asked, engines, files) == 7


def test_before_the_router_names_engines_the_configured_ones_count() -> None:
    urls = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert planned_engines(Config()) == 1
    assert planned_engines(Config(engine={"external": urls})) == 2  # type: ignore[arg-type]
    assert planned_engines(Config(engine={"num_engines": 4, "external": urls})) == 6  # type: ignore[arg-type]


@pytest.mark.parametrize("adaptive", [False, True])
async def test_engines_that_come_and_go_change_how_many_requests_are_in_flight(
    start_executor: StartExecutor, monkeypatch: pytest.MonkeyPatch, adaptive: bool
) -> None:
    monkeypatch.setattr(concurrency_module, "INTERVAL_S", 0.05)
    named = 0
    monkeypatch.setattr(EngineQueries, "known", property(lambda queries: named))
    monkeypatch.setattr(asyncrl.config.concurrency, "PER_ENGINE", 8)
    monkeypatch.setattr(asyncrl.rollout.connection, "planned_engines", lambda config: 3)
    adapt = {"adaptive_concurrency": adaptive}
    async with scripted_engine() as engine, start_executor(engine, rollout=adapt) as executor:
        await anyio.sleep(0.2)
        assert executor.statistics().concurrency == 24, "the router names no engine yet"
        named = 1
        await eventually(lambda: executor.statistics().concurrency == 8)
        named = 2
        if adaptive:
            await anyio.sleep(0.2)
            assert executor.statistics().concurrency == 8, "it rises only while requests are held back"
        else:
            await eventually(lambda: executor.statistics().concurrency == 16)
