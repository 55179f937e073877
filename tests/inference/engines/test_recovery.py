"""Processes of the fleet end and hang; the fleet goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import anyio
import pytest
from safetensors.torch import save_file

from asyncrl.errors import EngineError
from asyncrl.host import ProcessSpec
from asyncrl.inference.engines import restarts
from tests.inference.conftest import Fleet, StartFleet, dispose_within, eventually
from tests.inference.updates.test_weight_updates import acks, deliver, tensors_of
from tests.scripted import die, freeze, instead
from tests.scripted.faults import garbage, hang

pytestmark = pytest.mark.anyio

FAST = {"health": {"interval_s": 0.05, "timeout_s": 0.5, "failures": 2}}
"""A probe takes milliseconds; two in a row of half a second are a hang also on a machine that does much else."""


async def publish(fleet: Fleet, version: str, copies: Path | None) -> None:
    """A publication that leaves a copy under `copies`."""
    await fleet.controller.wait_ready()
    lease = await fleet.controller.begin_weight_update(version)
    deliver(fleet, version)
    directory = None
    if copies is not None:
        directory = copies / version
        directory.mkdir()
        save_file(tensors_of(fleet, version), directory / "model.safetensors")
    await fleet.controller.commit_weight_update(lease.lease_id, acks(lease), directory)


def serves(fleet: Fleet, index: int, version: str) -> bool:
    """By the engine's own word, and the router's."""
    engine = fleet.engines[index]
    status = fleet.controller.fleet().engines[index]
    known = status.endpoint.url in fleet.router.workers
    return engine.alive and known and engine.version == version and status.version == version and not engine.paused


async def test_an_engine_that_was_killed_serves_the_published_weights_again_and_disturbs_no_other(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(2, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        before = len(fleet.engines[1].calls)
        await fleet.host.signal("engine-0", signal.SIGKILL)
        await eventually(lambda: serves(fleet, 0, "0.0") and fleet.engines[0].lives == 2)
        assert fleet.engines[0].weights.digest == fleet.engines[1].weights.digest
        assert fleet.controller.fleet().engines[0].endpoint.generation == 1
        assert set(fleet.engines[1].calls[before:]) <= {"health_generate", "ping"}
        await eventually(lambda: "engine_caught_up" in fleet.kinds())
        assert fleet.controller.statistics().restarts == 1
    assert fleet.failures == []


async def test_a_restarted_engine_is_unknown_to_the_router_until_it_holds_the_published_weights(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(1, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        seen: list[tuple[list[str], str]] = []

        async def look() -> None:
            seen.append((list(fleet.router.workers), fleet.states()[0]))

        fleet.engines[0].script(instead("update_weights_from_disk", look))
        await fleet.host.signal("engine-0", signal.SIGKILL)
        await eventually(lambda: fleet.states() != ["serving"])
        await fleet.controller.prepare_rollout(1)
        assert seen == [([], "updating")]
        await eventually(lambda: serves(fleet, 0, "0.0"))


async def test_a_rollout_waits_for_the_only_engine_to_come_back(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with start_fleet(1, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        await fleet.host.kill("engine-0")
        await eventually(lambda: fleet.states() != ["serving"])
        with anyio.fail_after(5):
            await fleet.controller.prepare_rollout(1)
        await eventually(lambda: serves(fleet, 0, "0.0"))


async def test_without_a_copy_a_restarted_engine_joins_the_next_publication(start_fleet: StartFleet) -> None:
    async with start_fleet(2, restarts=3) as fleet:
        await publish(fleet, "0.0", None)
        await fleet.host.kill("engine-0")
        await eventually(lambda: fleet.states() == ["pending_weights", "serving"])
        assert len(fleet.router.workers) == 1
        await publish(fleet, "0.1", None)
        assert serves(fleet, 0, "0.1") and serves(fleet, 1, "0.1")


async def test_an_engine_that_is_overtaken_by_a_publication_ends_with_its_weights(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(2, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        overtaken = anyio.Event()

        async def overtake() -> None:
            lease = await fleet.controller.begin_weight_update("0.1")
            assert [engine.engine_id for engine in lease.engines] == ["engine-1"]
            fleet.engines[1].weights.load(tensors_of(fleet, "0.1").items())
            (tmp_path / "0.1").mkdir()
            save_file(tensors_of(fleet, "0.1"), tmp_path / "0.1" / "model.safetensors")
            await fleet.controller.commit_weight_update(lease.lease_id, acks(lease), tmp_path / "0.1")
            overtaken.set()

        fleet.engines[0].script(instead("update_weights_from_disk", overtake))
        await fleet.host.kill("engine-0")
        await eventually(lambda: serves(fleet, 0, "0.1"))
        assert overtaken.is_set()


async def test_an_engine_that_caught_up_while_a_publication_is_open_does_not_serve_the_old_weights(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(2, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        leases = []

        async def begin() -> None:
            leases.append(await fleet.controller.begin_weight_update("0.1"))

        fleet.engines[0].script(instead("update_weights_from_disk", begin))
        await fleet.host.kill("engine-0")
        await eventually(lambda: bool(leases) and fleet.states() == ["pending_weights", "updating"])
        assert len(fleet.router.workers) == 1
        await fleet.controller.abort_weight_update(leases[0].lease_id, {}, untouched=True)
        await eventually(lambda: serves(fleet, 0, "0.0") and serves(fleet, 1, "0.0"))


async def test_an_update_right_after_one_that_was_given_up_finds_the_engine_free(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(1) as fleet:
        await publish(fleet, "0.0", tmp_path)
        for number in range(1, 4):
            lease = await fleet.controller.begin_weight_update(f"0.{number}")
            await fleet.controller.abort_weight_update(lease.lease_id, {})
        await publish(fleet, "0.4", tmp_path)
        assert serves(fleet, 0, "0.4")


async def test_an_engine_that_an_update_could_not_open_takes_the_published_weights_back(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(1) as fleet:
        await publish(fleet, "0.0", tmp_path)
        lease = await fleet.controller.begin_weight_update("0.1")
        await fleet.controller.abort_weight_update(lease.lease_id, {})
        with anyio.CancelScope() as scope:
            scope.cancel()
            await fleet.controller.begin_weight_update("0.2")
        await eventually(lambda: serves(fleet, 0, "0.0"))


async def test_an_update_waits_for_the_only_engine_that_is_being_started_again(start_fleet: StartFleet) -> None:
    async with start_fleet(1, restarts=3) as fleet:
        await publish(fleet, "0.0", None)
        await fleet.host.kill("engine-0")
        await eventually(lambda: fleet.states() != ["serving"])
        with anyio.fail_after(5):
            await publish(fleet, "0.1", None)
        assert serves(fleet, 0, "0.1")


async def test_an_engine_whose_scheduler_stands_still_is_killed_and_started_again(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(2, restarts=3, **FAST) as fleet:
        await publish(fleet, "0.0", tmp_path)
        fleet.engines[0].script(freeze("health_generate"))
        await eventually(lambda: fleet.engines[0].lives == 2 and serves(fleet, 0, "0.0"))
        reasons = [e["reason"] for e in fleet.events.recent if e["kind"] == "engine_state" and e["reason"]]
        assert any("2 health probes in a row failed" in reason for reason in reasons)
        assert fleet.engines[1].lives == 1


async def test_one_failed_probe_convicts_nobody(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with start_fleet(1, restarts=3, **FAST) as fleet:
        await publish(fleet, "0.0", tmp_path)
        fleet.engines[0].script(hang("health_generate"))
        await eventually(lambda: fleet.engines[0].calls.count("health_generate") >= 4)
        assert fleet.engines[0].lives == 1


async def test_no_engine_is_probed_while_it_is_updated_or_probes_are_paused(start_fleet: StartFleet) -> None:
    async with start_fleet(1, restarts=3, **FAST) as fleet:
        await publish(fleet, "0.0", None)
        await eventually(lambda: "health_generate" in fleet.engines[0].calls)
        lease = await fleet.controller.begin_weight_update("0.1")
        await anyio.sleep(0.6)  # a probe under way ends
        fleet.engines[0].calls.clear()
        await anyio.sleep(0.6)
        assert "health_generate" not in fleet.engines[0].calls
        await fleet.controller.abort_weight_update(lease.lease_id, {}, untouched=True)
        await fleet.controller.health_monitoring_pause()
        await anyio.sleep(0.6)
        fleet.engines[0].calls.clear()
        await anyio.sleep(0.3)
        assert "health_generate" not in fleet.engines[0].calls
        await fleet.controller.health_monitoring_resume()
        await eventually(lambda: "health_generate" in fleet.engines[0].calls)
        assert fleet.engines[0].lives == 1


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_router_that_ends_or_hangs_is_started_again_and_knows_its_engines(
    start_fleet: StartFleet, way: signal.Signals
) -> None:
    async with start_fleet(2, restarts=3, **FAST) as fleet:
        await publish(fleet, "0.0", None)
        url = fleet.controller.router_url
        await fleet.host.signal("router", way)
        await eventually(lambda: fleet.router.lives == 2 and len(fleet.router.workers) == 2)
        assert fleet.controller.router_url == url
        await eventually(lambda: "router_restarted" in fleet.kinds())
        await publish(fleet, "0.1", None)
        assert serves(fleet, 0, "0.1") and serves(fleet, 1, "0.1")
    assert fleet.failures == []


async def test_a_publication_while_the_router_is_down_is_committed_and_routed_later(start_fleet: StartFleet) -> None:
    async with start_fleet(2, restarts=3) as fleet:
        await fleet.controller.wait_ready()
        fleet.engines[0].script(instead("continue_generation", lambda: fleet.host.signal("router", signal.SIGKILL)))
        await publish(fleet, "0.0", None)
        await eventually(lambda: serves(fleet, 0, "0.0") and serves(fleet, 1, "0.0"))
    assert fleet.failures == []


async def test_an_engine_restarted_five_times_on_its_port_serves_each_time(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(1, restarts=5) as fleet:
        await publish(fleet, "0.0", tmp_path)
        url = fleet.engines[0].url
        for life in (2, 3):  # pauses grow from the second on
            await fleet.host.kill("engine-0")
            await eventually(lambda life=life: fleet.engines[0].lives == life and serves(fleet, 0, "0.0"))
            assert fleet.engines[0].url == url


async def test_an_engine_that_ends_too_often_is_given_up_and_the_others_go_on(start_fleet: StartFleet) -> None:
    async with start_fleet(2, restarts=1) as fleet:
        await publish(fleet, "0.0", None)
        fleet.engines[0].exit_code = 1
        await fleet.host.kill("engine-0")
        await eventually(lambda: "process_given_up" in fleet.kinds())
        await fleet.controller.prepare_rollout(1)
        await publish(fleet, "0.1", None)
        assert serves(fleet, 1, "0.1")
        assert fleet.failures == []
        fleet.engines[1].exit_code = 1
        await fleet.host.kill("engine-1")
        await eventually(lambda: bool(fleet.failures))
        with pytest.raises(EngineError, match=r"engine-1 is not started again: it was 1 time within 1800 s"):
            await fleet.controller.prepare_rollout(2)


async def test_a_fleet_that_waits_to_restart_an_engine_is_disposed_of_at_once(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 60.0)
    async with start_fleet(2, restarts=5) as fleet:
        await publish(fleet, "0.0", None)
        fleet.engines[0].exit_code = 1
        await fleet.host.kill("engine-0")
        await eventually(lambda: fleet.kinds().count("process_restarting") == 2)  # the second pauses for a minute
        await dispose_within(fleet, 10)
    assert fleet.failures == []


async def test_recovery_can_be_waited_for(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with start_fleet(2, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        await fleet.host.kill("engine-0")
        await eventually(lambda: fleet.states()[0] != "serving")
        await fleet.controller.recover_updatable_engines()
        await eventually(lambda: serves(fleet, 0, "0.0"))


async def test_the_failure_of_a_process_is_not_laid_to_its_successor(start_fleet: StartFleet) -> None:
    async with start_fleet(2, restarts=5, weights={"verify": "never"}) as fleet:
        await publish(fleet, "0.0", None)
        fleet.engines[0].script(die("pause_generation"))

        async def until_the_other_is_back() -> None:
            await eventually(lambda: fleet.engines[0].lives == 2 and fleet.states()[0] == "pending_weights")

        fleet.engines[1].script(instead("pause_generation", until_the_other_is_back))
        lease = await fleet.controller.begin_weight_update("0.1")
        assert [engine.engine_id for engine in lease.engines] == ["engine-1"]
        await fleet.controller.abort_weight_update(lease.lease_id, {}, untouched=True)
        assert fleet.states() == ["pending_weights", "serving"]
        assert fleet.engines[0].lives == 2


async def test_the_first_publication_outlives_the_death_of_the_router(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_fleet(1, restarts=3) as fleet:
        await fleet.controller.wait_ready()
        spawn = fleet.host.spawn

        async def slow(spec: ProcessSpec) -> int:
            await anyio.sleep(0.5)
            return await spawn(spec)

        monkeypatch.setattr(fleet.host, "spawn", slow)
        lease = await fleet.controller.begin_weight_update("0.0")
        deliver(fleet, "0.0")
        await fleet.host.signal("router", signal.SIGKILL)
        await fleet.controller.commit_weight_update(lease.lease_id, acks(lease))
        await fleet.controller.prepare_rollout(0)
        assert serves(fleet, 0, "0.0")
    assert fleet.failures == []


async def test_a_router_that_stood_still_as_an_engine_was_taken_out_forgets_it_later(start_fleet: StartFleet) -> None:
    async with start_fleet(1, restarts=3) as fleet:
        await publish(fleet, "0.0", None)
        lease = await fleet.controller.begin_weight_update("0.1")
        fleet.router.faults.add(hang("workers"))
        await fleet.controller.abort_weight_update(lease.lease_id, {})
        await eventually(lambda: fleet.router.workers == [])


async def test_an_engine_is_not_started_again_while_a_router_that_stands_still_may_send_it_requests(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(1, restarts=3) as fleet:
        await publish(fleet, "0.0", tmp_path)
        fleet.router.faults.add(hang("workers", times=None))
        await fleet.host.kill("engine-0")
        await eventually(lambda: "process_restarting" in fleet.kinds())
        await anyio.sleep(1.5)  # longer than anybody else waits for a router to take an engine out
        assert fleet.engines[0].lives == 1 and len(fleet.router.workers) == 1
        fleet.router.faults.clear()
        await eventually(lambda: fleet.engines[0].lives == 2 and serves(fleet, 0, "0.0"))


async def test_a_fleet_that_is_disposed_of_before_its_router_started_starts_none(start_fleet: StartFleet) -> None:
    async with start_fleet(1, restarts=3) as fleet:
        await fleet.controller.dispose()
        await anyio.sleep(0.2)
        assert not fleet.router.alive and not fleet.engines[0].alive
    assert fleet.failures == []


async def test_a_router_that_answers_nonsense_is_told_in_one_message(start_fleet: StartFleet) -> None:
    async with start_fleet(1, restarts=3) as fleet:
        await fleet.controller.wait_ready()
        fleet.router.faults.add(garbage("workers"))
        router = fleet.controller._started.actor.routing.router
        with pytest.raises(EngineError, match="router: GET /workers: "):
            await router.workers()


async def test_an_engine_whose_answers_cannot_be_believed_is_started_again_and_serves_the_same_weights(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with start_fleet(2, restarts=1) as fleet:
        controller = fleet.controller
        controller.quarantine_engine("engine-1", "it does not serve yet")
        await publish(fleet, "0.0", tmp_path)
        controller.quarantine_engine("engine-7", "there is none")
        controller.quarantine_engine("engine-1", "8 of its last 9 answers cannot have been sampled")
        controller.quarantine_engine("engine-1", "told twice")
        await eventually(lambda: fleet.engines[1].lives == 2 and serves(fleet, 1, "0.0"))
        await eventually(lambda: len(fleet.router.workers) == 2)
        assert fleet.engines[0].lives == 1
    reasons = [event["reason"] for event in fleet.events.recent if event.get("state") == "quarantined"]
    assert reasons == ["8 of its last 9 answers cannot have been sampled"] and fleet.failures == []
