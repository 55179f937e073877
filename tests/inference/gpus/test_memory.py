"""Order and arguments of offload and onload, which only a GPU can run for real, and what becomes of who fails at it."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import anyio
import pytest

from asyncrl.errors import EngineError, EnginesLostError, WeightUpdateError
from asyncrl.host import ProcessExit
from asyncrl.inference.sglang import engine_api
from asyncrl.inference.updates.deadlines import Deadlines
from asyncrl.observability.waits import WAITS, waiting
from tests.inference.conftest import Fleet, StartFleet, colocated_layout, cpu_layout, dispose_within, eventually
from tests.inference.engines.test_recovery import publish, serves
from tests.inference.gpus.test_colocation import publish as publish_in_turn
from tests.inference.updates.test_weight_updates import acks, deliver
from tests.scripted import Fault, die, drop, hang, instead, refuse

pytestmark = pytest.mark.anyio

ALL = {"kv_cache", "cuda_graph", "weights"}
FAULTS: dict[str, Callable[..., Fault]] = {
    "dies": die,
    "hangs": hang,
    "drops the connection": drop,
    "answers 500": functools.partial(refuse, status=500),
}


def shorten(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The deadline of this call to engine-1, which hangs, and of no other: a busy machine takes half a second too."""

    def wait(what: str, whom: str, timeout_s: float) -> AbstractContextManager[object]:
        return waiting(what, whom, 0.5 if (what, whom) == (step, "engine-1") else timeout_s)

    monkeypatch.setattr(engine_api, "waiting", wait)


def memory_calls(fleet: Fleet, index: int = 0) -> list[str]:
    moves = {"pause_generation", "continue_generation", "release_memory_occupation", "resume_memory_occupation"}
    return [call for call in fleet.engines[index].calls if call in moves]


async def test_an_engine_is_paused_before_its_memory_goes_and_goes_on_after_all_of_it_is_back(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(1, colocated=True) as fleet:
        await publish(fleet, "0.1", tmp_path)
        engine, controller = fleet.engines[0], fleet.controller
        engine.calls.clear()
        await controller.offload()
        assert memory_calls(fleet) == ["pause_generation", "release_memory_occupation"]
        assert fleet.states() == ["offloaded"] and engine.offloaded == ALL
        await controller.onload_weights()
        assert fleet.states() == ["offloaded"] and engine.paused
        await controller.onload_kv()
        assert memory_calls(fleet)[2:] == ["resume_memory_occupation"] * 2 + ["continue_generation"]
        assert engine.memory_calls == [
            ("release", ("kv_cache", "cuda_graph", "weights")),
            ("resume", ("weights",)),
            ("resume", ("cuda_graph", "kv_cache")),
        ]
        await eventually(lambda: serves(fleet, 0, "0.1"))


async def test_weights_that_were_released_are_served_by_nobody_before_they_are_there_again(
    start_fleet: StartFleet,
) -> None:
    async with start_fleet(2, colocated=True) as fleet:
        await publish(fleet, "0.0", None)
        await fleet.controller.offload()
        await fleet.controller.onload()
        assert fleet.states() == ["pending_weights"] * 2 and fleet.router.workers == []
        assert fleet.controller.fleet().needs_publication
        checks = fleet.engines[0].calls.count("weights_checker")
        await publish(fleet, "0.0", None)
        assert serves(fleet, 0, "0.0") and serves(fleet, 1, "0.0")
        assert fleet.engines[0].calls.count("weights_checker") == checks, "its tensor names were proved before"


@pytest.mark.parametrize("torn", ["by a publication", "by a copy"])
async def test_weights_that_were_torn_are_proved_again_however_often_memory_was_away(
    start_fleet: StartFleet, tmp_path: Path, torn: str
) -> None:
    async with start_fleet(1, colocated=True) as fleet:
        await publish(fleet, "0.0", tmp_path if torn == "by a copy" else None)
        await fleet.controller.offload()
        fleet.engines[0].script(refuse("update_weights_from_disk"))
        await fleet.controller.onload()
        if torn == "by a copy":
            await eventually(lambda: fleet.engines[0].faults.happened != [])
            await eventually(lambda: fleet.states() == ["pending_weights"])
        else:
            lease = await fleet.controller.begin_weight_update("0.1")
            await fleet.controller.abort_weight_update(lease.lease_id, {})
        lease = await fleet.controller.begin_weight_update("0.2")
        with pytest.raises(WeightUpdateError, match="took the update but ignored embed, layer"):
            await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))  # nothing was sent


async def test_what_an_engine_keeps_while_only_its_cache_is_away_it_serves_again(start_fleet: StartFleet) -> None:
    async with start_fleet(1, colocated=True) as fleet:
        await publish(fleet, "0.0", None)
        await fleet.controller.offload_kv()
        await fleet.controller.onload_kv()
        assert serves(fleet, 0, "0.0")


async def test_offloading_twice_and_onloading_what_is_there_are_nothing_to_do(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(1, colocated=True) as fleet:
        await publish(fleet, "0.1", tmp_path)
        fleet.engines[0].calls.clear()
        await fleet.controller.onload()
        await fleet.controller.offload(("kv_cache",))
        await fleet.controller.offload(("kv_cache",))
        assert memory_calls(fleet) == ["pause_generation", "release_memory_occupation"]


async def test_an_engine_with_gpus_of_its_own_keeps_its_memory(start_fleet: StartFleet, tmp_path: Path) -> None:
    layout = colocated_layout(2)
    layout = type(layout)(
        **{field: getattr(layout, field) for field in layout.__dataclass_fields__}
        | {"engines": (layout.engines[0], cpu_layout(2).engines[1])}
    )
    async with start_fleet(2, colocated=True, layout=layout) as fleet:
        await publish(fleet, "0.1", tmp_path)
        await fleet.controller.offload()
        assert fleet.states() == ["offloaded", "serving"]
        assert fleet.engines[1].memory_calls == []


async def test_an_unknown_tag_is_refused_with_those_there_are(start_fleet: StartFleet) -> None:
    async with start_fleet(1, colocated=True) as fleet:
        with pytest.raises(EngineError, match=r"unknown memory tags \['kv'\]; there are kv_cache, cuda_graph, weights"):
            await fleet.controller.offload(("kv",))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("step", ["pause_generation", "release_memory_occupation"])
async def test_an_engine_that_fails_to_give_its_memory_up_is_killed_and_comes_back_in_the_engines_turn(
    start_fleet: StartFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, fault: str
) -> None:
    async with start_fleet(2, colocated=True, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        if fault == "hangs":
            shorten(monkeypatch, step)
        fleet.engines[1].script(FAULTS[fault](step))
        await fleet.controller.offload()
        assert fleet.engines[0].offloaded == ALL and not fleet.engines[1].alive
        await fleet.controller.onload()
        await eventually(lambda: serves(fleet, 0, "0.0") and serves(fleet, 1, "0.0"))
        assert not any(engine.paused or engine.offloaded for engine in fleet.engines)
        assert [engine.lives for engine in fleet.engines] == [1, 2]
    assert fleet.failures == []


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("step", ["resume_memory_occupation", "continue_generation"])
async def test_an_engine_that_fails_to_take_its_memory_back_is_started_again(
    start_fleet: StartFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, fault: str
) -> None:
    async with start_fleet(2, colocated=True, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        if fault == "hangs":
            shorten(monkeypatch, step)
        await fleet.controller.offload()
        fleet.engines[1].script(FAULTS[fault](step))
        await fleet.controller.onload()
        await eventually(lambda: serves(fleet, 0, "0.0") and serves(fleet, 1, "0.0"))
        assert [engine.lives for engine in fleet.engines] == [1, 2]
    assert fleet.failures == []


@pytest.mark.parametrize("step", ["pause_generation", "release_memory_occupation", "resume_memory_occupation"])
async def test_an_engine_left_halfway_by_a_cancellation_is_started_again(
    start_fleet: StartFleet, tmp_path: Path, step: str
) -> None:
    async with start_fleet(2, colocated=True, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        with anyio.CancelScope() as scope:

            async def cancel() -> None:
                scope.cancel()
                await anyio.sleep_forever()

            fleet.engines[1].script(instead(step, cancel))
            await fleet.controller.offload()
            await fleet.controller.onload()
        assert scope.cancelled_caught
        assert not fleet.engines[1].alive
        await fleet.controller.onload()
        await eventually(lambda: serves(fleet, 1, "0.0"))
        await eventually(lambda: serves(fleet, 0, "0.0"))
    assert fleet.failures == []


@pytest.mark.parametrize("way", [signal.SIGKILL, "scheduler"])
async def test_an_engine_that_dies_in_the_trainers_turn_is_not_started_before_its_end(
    start_fleet: StartFleet, tmp_path: Path, way: signal.Signals | str
) -> None:
    async with start_fleet(2, colocated=True, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        await fleet.controller.offload()
        if isinstance(way, signal.Signals):
            await fleet.host.signal("engine-1", way)
        else:
            await fleet.controller._started.actor.quarantine(fleet.controller._started.actor.engines[1], way)
        await eventually(lambda: any(wait.what.startswith("end of the trainer's turn") for wait in WAITS.snapshot()))
        await fleet.controller.onload_weights()
        assert fleet.engines[1].lives == 1, "the trainer's weights are still there"
        await fleet.controller.onload_kv()
        await eventually(lambda: serves(fleet, 1, "0.0"))
        assert fleet.engines[1].lives == 2
    assert fleet.failures == []


async def test_a_publication_in_the_trainers_turn_goes_to_those_that_live_and_waits_for_no_other(
    start_fleet: StartFleet,
) -> None:
    async with start_fleet(2, colocated=True, restarts=3, engine={"min_serving": 2}) as fleet:
        await fleet.controller.wait_ready()
        await fleet.controller.offload()
        await publish_in_turn(fleet, "0.0")
        await fleet.controller.offload()
        await fleet.host.kill("engine-1")
        await eventually(lambda: fleet.states()[1] == "dead")
        with anyio.fail_after(5):
            await publish_in_turn(fleet, "0.1")
        await eventually(lambda: fleet.engines[1].lives == 2 and fleet.states() == ["serving", "pending_weights"])
        await fleet.controller.offload()
        await publish_in_turn(fleet, "0.2")
        await eventually(lambda: serves(fleet, 0, "0.2") and serves(fleet, 1, "0.2"))
    assert fleet.failures == []


async def test_a_publication_for_which_nobody_is_left_in_the_trainers_turn_is_refused_at_once(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(1, colocated=True, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        await fleet.controller.offload()
        await fleet.host.kill("engine-0")
        await eventually(lambda: fleet.states() == ["dead"])
        with anyio.fail_after(10), pytest.raises(EnginesLostError, match=r"weights 0\.1: no engine is left in the"):
            await fleet.controller.begin_weight_update("0.1")
        await fleet.controller.onload()
        with anyio.fail_after(5):
            await fleet.controller.wait_updatable()
    assert fleet.failures == []


async def test_offloading_waits_for_an_engine_that_starts_and_loads_and_then_keeps_it_from_its_memory(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(2, colocated=True, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        fleet.engines[1].script(instead("update_weights_from_disk", lambda: anyio.sleep(0.3)))
        await fleet.host.kill("engine-1")
        await eventually(lambda: fleet.states()[1] == "starting" or fleet.engines[1].lives == 2)
        with anyio.fail_after(5):
            await fleet.controller.offload()
        assert all(engine.offloaded == ALL for engine in fleet.engines)
        await fleet.controller.onload()
        await eventually(lambda: serves(fleet, 0, "0.0") and serves(fleet, 1, "0.0"))


async def test_an_engine_whose_start_does_not_end_makes_room_by_force(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with start_fleet(2, colocated=True, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        fleet.controller._started.memory._settle_timeout_s = 0.5
        fleet.engines[1].script(hang("generate", times=None))
        await fleet.host.kill("engine-1")
        await eventually(lambda: fleet.engines[1].lives == 2)
        with anyio.fail_after(10):
            await fleet.controller.offload()
        assert not fleet.engines[1].alive
        fleet.engines[1].faults.clear()
        await fleet.controller.onload()
        await eventually(lambda: serves(fleet, 1, "0.0"))


async def test_memory_does_not_move_while_weights_are_published(start_fleet: StartFleet) -> None:
    async with start_fleet(2, colocated=True) as fleet:
        await publish(fleet, "0.0", None)
        lease = await fleet.controller.begin_weight_update("0.1")
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(fleet.controller.offload)
            await eventually(lambda: any("engines on the trainer's GPUs" in wait.subject for wait in WAITS.snapshot()))
            deliver(fleet, "0.1")
            await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))
        assert all(engine.offloaded == ALL and engine.version == "0.1" for engine in fleet.engines)
        assert fleet.states() == ["offloaded", "offloaded"]


async def test_the_wait_for_the_trainers_turn_has_an_end(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with start_fleet(2, colocated=True, restarts=3, train={"step_timeout_s": 0.1}) as fleet:
        await publish(fleet, "0.0", tmp_path)
        await fleet.controller.offload()
        await fleet.host.kill("engine-1")
        await eventually(
            lambda: not fleet.controller._started.actor.is_wanted(fleet.controller._started.actor.engines[1])
        )
        assert "process_given_up" in fleet.kinds()
        await fleet.controller.onload()
        await fleet.controller.prepare_rollout(1)
        assert fleet.engines[1].lives == 1
    assert fleet.failures == []


async def test_a_fleet_is_disposed_of_at_once_while_an_engine_waits_for_its_gpu(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(1, colocated=True, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        await fleet.controller.offload()
        await fleet.host.kill("engine-0")
        await eventually(lambda: fleet.states() == ["dead"])
        await dispose_within(fleet, 10)
    assert fleet.failures == []


async def test_offloading_waits_for_the_end_of_an_engine_that_is_being_killed(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(2, colocated=True, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        kill, actor = fleet.host.kill, fleet.controller._started.actor

        async def slow(name: str) -> ProcessExit:
            await anyio.sleep(0.3)
            return await kill(name)

        fleet.host.kill = slow  # type: ignore[method-assign]
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(actor.quarantine, actor.engines[1], "it hangs")
            await eventually(lambda: fleet.states()[1] == "quarantined")
            await fleet.controller.offload()
            assert not fleet.engines[1].alive, "the trainer would not find its memory free"


@pytest.mark.parametrize("why", ["cancelled", "a publication does not end"])
async def test_an_offload_that_moved_nothing_leaves_the_turn_with_the_engines(
    start_fleet: StartFleet, tmp_path: Path, why: str
) -> None:
    async with start_fleet(2, colocated=True, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        if why == "cancelled":
            with anyio.CancelScope() as scope:
                scope.cancel()
                await fleet.controller.offload()
        else:
            parts, held = fleet.controller._started, anyio.Event()
            parts.memory._lease_timeout_s = 0.1

            async def hold() -> None:
                async with parts.state.lock:
                    held.set()
                    await anyio.sleep_forever()

            async with anyio.create_task_group() as task_group:
                task_group.start_soon(hold)
                await held.wait()
                with pytest.raises(EngineError, match="memory of engines was not moved"):
                    await fleet.controller.offload()
                task_group.cancel_scope.cancel()
        assert fleet.states() == ["serving"] * 2
        await fleet.host.kill("engine-1")
        await eventually(lambda: fleet.engines[1].lives == 2 and serves(fleet, 1, "0.0"))
    assert fleet.failures == []


async def test_each_move_of_memory_has_a_deadline_that_follows_from_the_weights(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, float] = {}

    def noted(what: str, whom: str, timeout_s: float) -> AbstractContextManager[None]:
        asked[what] = timeout_s
        return waiting(what, whom, timeout_s)

    async with start_fleet(1, colocated=True) as fleet:
        await publish(fleet, "0.0", None)
        monkeypatch.setattr(engine_api, "waiting", noted)
        large = fleet.controller._started.actor.deadlines = Deadlines(size_bytes=50 * 10**9, ranks=2)
        await fleet.controller.offload()
        await fleet.controller.onload()
        assert large.move_s == 310.0
        assert asked == {
            "pause_generation": large.pause_s,
            "release_memory_occupation": large.move_s,
            "resume_memory_occupation": large.move_s,
            "continue_generation": large.step_s,
        } | {what: s for what, s in asked.items() if what.startswith(("health", "generate"))}
