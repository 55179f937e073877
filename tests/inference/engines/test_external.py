"""Engines that somebody else runs: they join by url, are never ended, and come back as they went."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest

from asyncrl.config.layout import ExternalEngine, ProcessLayout
from asyncrl.data.fleet import owner_in
from asyncrl.errors import EngineError
from asyncrl.inference.external import claims
from asyncrl.inference.external import keeper as external_keeper
from asyncrl.inference.sglang.engine_api import EngineApi, new_session
from asyncrl.inference.updates import deadlines
from tests.inference.conftest import Fleet, StartFleet, cpu_layout, dispose_within, eventually
from tests.inference.engines.test_recovery import FAST, publish, serves
from tests.scripted import ScriptedEngine, freeze, garbage, instead, refuse

pytestmark = pytest.mark.anyio


class Stranger:
    """An engine in the hands of the test: no host knows it."""

    def __init__(self, engine: ScriptedEngine, tasks: anyio.abc.TaskGroup) -> None:
        self.engine = engine
        self._tasks = tasks

    async def start(self) -> None:
        port = int(self.engine.url.rpartition(":")[2] or 0) if self.engine.url else 0
        await self._tasks.start(self.engine.run, port)

    async def restart(self) -> None:
        self.engine.kill()
        await eventually(lambda: self.engine._runner is None)
        await self.start()


@asynccontextmanager
async def beside_one_stranger(
    start_fleet: StartFleet, *, own: int = 1, tensor_parallel: int = 1, **settings: Any
) -> AsyncIterator[tuple[Fleet, Stranger]]:
    """A fleet of `own` engines and one external, which comes last in its lists; it outlives the fleet."""
    async with anyio.create_task_group() as tasks:
        stranger = Stranger(ScriptedEngine(tensor_parallel=tensor_parallel), tasks)
        await stranger.start()
        external = ExternalEngine("external-0", stranger.engine.url, "broadcast")
        layout = replace(cpu_layout(own), external=(external,))
        async with start_fleet(own, layout=layout, **({"restarts": 3} | settings)) as fleet:
            fleet.engines.append(stranger.engine)
            yield fleet, stranger
        stranger.engine.kill()
    assert fleet.failures == []


async def test_an_external_engine_takes_weights_as_any_other_and_its_ranks_are_asked_for(
    start_fleet: StartFleet,
) -> None:
    async with beside_one_stranger(start_fleet, tensor_parallel=2) as (fleet, stranger):
        await fleet.controller.wait_ready()
        status = fleet.controller.fleet().engines[1]
        assert (status.endpoint.engine_id, status.endpoint.tensor_parallel) == ("external-0", 2)
        await publish(fleet, "0.0", None)
        assert serves(fleet, 0, "0.0") and serves(fleet, 1, "0.0")
        assert stranger.engine.weights.digest == fleet.engines[0].weights.digest
        assert "external-0" not in fleet.host.spawned


async def test_a_fleet_may_be_all_external(start_fleet: StartFleet) -> None:
    async with beside_one_stranger(start_fleet, own=0) as (fleet, _):
        await publish(fleet, "0.0", None)
        assert serves(fleet, 0, "0.0")
        await fleet.controller.prepare_rollout(0)


async def test_an_engine_that_was_left_paused_with_an_open_session_joins_in_order(start_fleet: StartFleet) -> None:
    async with anyio.create_task_group() as tasks:
        engine = ScriptedEngine()
        await Stranger(engine, tasks).start()
        await engine.generation.pause("retract")
        engine.weights.session = True
        layout = replace(cpu_layout(0), external=(ExternalEngine("external-0", engine.url, "broadcast"),))
        async with start_fleet(0, layout=layout) as fleet:
            fleet.engines.append(engine)
            await fleet.controller.wait_ready()
            assert not engine.paused and not engine.session
            await publish(fleet, "0.0", None)
        engine.kill()


@pytest.mark.parametrize("way", ["dies", "hangs"])
async def test_an_external_engine_that_goes_away_is_found_by_probes_and_joins_anew_when_it_answers(
    start_fleet: StartFleet, tmp_path: Path, way: str
) -> None:
    weights = {"directory": tmp_path}
    async with beside_one_stranger(start_fleet, weights=weights, **FAST) as (fleet, stranger):
        await publish(fleet, "0.0", tmp_path)
        if way == "dies":
            stranger.engine.kill()
        else:
            stranger.engine.script(freeze("health_generate"))
        await eventually(lambda: fleet.states()[1] in ("quarantined", "starting"))
        await eventually(lambda: fleet.router.workers == [fleet.engines[0].url])
        await publish(fleet, "0.1", tmp_path)  # goes on without it
        if way == "dies":
            await eventually(lambda: stranger.engine._runner is None)
            await stranger.start()
        else:
            assert stranger.engine.alive  # nobody killed it
            stranger.engine.thaw()
        await eventually(lambda: serves(fleet, 1, "0.1"))
        assert fleet.controller.fleet().engines[1].endpoint.generation >= 1
        assert stranger.engine.weights.digest == fleet.engines[0].weights.digest


async def test_an_external_engine_whose_answers_cannot_be_believed_leaves_the_router_and_joins_anew(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with beside_one_stranger(start_fleet, weights={"directory": tmp_path}) as (fleet, stranger):
        await publish(fleet, "0.0", tmp_path)
        fleet.controller.quarantine_engine("external-0", "8 of its last 9 answers cannot have been sampled")
        await eventually(lambda: fleet.router.workers == [fleet.engines[0].url])
        assert stranger.engine.alive
        await eventually(lambda: serves(fleet, 1, "0.0"))
        assert fleet.controller.fleet().engines[1].endpoint.generation == 1


async def test_without_a_shared_directory_it_waits_for_the_next_publication(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with beside_one_stranger(start_fleet, **FAST) as (fleet, stranger):
        await publish(fleet, "0.0", tmp_path)
        await stranger.restart()
        await eventually(lambda: fleet.states() == ["serving", "pending_weights"])
        assert "update_weights_from_disk" not in stranger.engine.calls
        assert fleet.router.workers == [fleet.engines[0].url]
        await publish(fleet, "0.1", tmp_path)
        assert serves(fleet, 1, "0.1")


async def test_an_engine_that_leaves_is_not_counted_on_by_one_that_cannot_load_the_copy(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    async with beside_one_stranger(start_fleet, **FAST) as (fleet, stranger):
        await publish(fleet, "0.0", tmp_path)
        await stranger.restart()
        await eventually(lambda: fleet.states() == ["serving", "pending_weights"])
        assert not fleet.controller.fleet().needs_publication
        fleet.engines[0].script(refuse("flush_cache", times=None))  # it has a request that does not end
        async with anyio.create_task_group() as task_group:
            task_group.start_soon(partial(fleet.controller.stop_cell, "engine-0", force=True))
            with anyio.fail_after(10):
                await fleet.controller.wait_publication_needed()
            assert fleet.states() == ["draining", "pending_weights"]
            task_group.cancel_scope.cancel()


async def test_one_that_restarts_unseen_between_two_probes_serves_no_old_weights_for_long(
    start_fleet: StartFleet,
) -> None:
    """Nobody tells that its process is another one by now; its version stamp does."""
    async with beside_one_stranger(start_fleet, **FAST) as (fleet, stranger):
        await publish(fleet, "0.0", None)
        await fleet.controller.health_monitoring_pause()
        await stranger.restart()
        assert stranger.engine.version == "default"
        await fleet.controller.health_monitoring_resume()
        await eventually(lambda: fleet.states() == ["serving", "pending_weights"])
        assert fleet.router.workers == [fleet.engines[0].url]


async def test_an_external_engine_that_refuses_weights_is_unrouted_and_put_in_order(start_fleet: StartFleet) -> None:
    async with beside_one_stranger(start_fleet) as (fleet, stranger):
        await publish(fleet, "0.0", None)
        stranger.engine.script(refuse("begin_weight_update"))
        lease = await fleet.controller.begin_weight_update("0.1")
        assert [engine.engine_id for engine in lease.engines] == ["engine-0"]
        await eventually(lambda: not stranger.engine.paused)
        await fleet.controller.abort_weight_update(lease.lease_id, {}, untouched=True)
        await publish(fleet, "0.1", None)
        await eventually(lambda: fleet.states() == ["serving", "pending_weights"] or serves(fleet, 1, "0.1"))
        await publish(fleet, "0.2", None)
        assert serves(fleet, 0, "0.2") and serves(fleet, 1, "0.2")
        assert stranger.engine.lives == 1


async def test_disposal_leaves_it_alive_unpaused_idle_and_without_a_session(start_fleet: StartFleet) -> None:
    async with beside_one_stranger(start_fleet) as (fleet, stranger):
        await publish(fleet, "0.0", None)
        await fleet.controller.begin_weight_update("0.1")
        assert stranger.engine.paused and stranger.engine.session
        await fleet.controller.dispose()
        assert stranger.engine.alive
        assert not stranger.engine.paused and not stranger.engine.session
        assert fleet.states() == ["stopped", "stopped"]


async def test_disposal_does_not_wait_for_one_that_hangs(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "TAKE_BACK_S", 0.3)
    async with beside_one_stranger(start_fleet) as (fleet, stranger):
        await publish(fleet, "0.0", None)
        stranger.engine.suspend()
        await dispose_within(fleet, 10)


async def test_it_is_stopped_and_started_like_others_but_lives_on(start_fleet: StartFleet, tmp_path: Path) -> None:
    async with beside_one_stranger(start_fleet, weights={"directory": tmp_path}) as (fleet, stranger):
        await publish(fleet, "0.0", tmp_path)
        await fleet.controller.stop_cell("external-0")
        assert fleet.states() == ["serving", "stopped"]
        assert stranger.engine.alive
        assert fleet.router.workers == [fleet.engines[0].url]
        await publish(fleet, "0.1", tmp_path)
        assert stranger.engine.version == "free"
        await fleet.controller.start_cell("external-0")
        await eventually(lambda: serves(fleet, 1, "0.1"))


async def test_one_that_is_not_there_is_named_with_its_url(start_fleet: StartFleet) -> None:
    layout = replace(cpu_layout(0), external=(ExternalEngine("external-0", "http://127.0.0.1:9", "broadcast"),))
    async with start_fleet(0, layout=layout, engine={"start_timeout_s": 3.0}) as fleet:
        with pytest.raises(EngineError, match=r"is an engine running at http://127\.0\.0\.1:9\? last: .*Connect"):
            await fleet.controller.wait_ready()


async def test_one_with_data_parallel_ranks_is_refused(start_fleet: StartFleet) -> None:
    async with one_stranger() as engine, start_fleet(0, layout=layout_of(engine.url)) as fleet:
        engine.data_parallel = 2
        with pytest.raises(EngineError, match=r"data parallel size 2 .* tensor-parallel ranks only"):
            await fleet.controller.wait_ready()


# whose engine it is


@asynccontextmanager
async def one_stranger() -> AsyncIterator[ScriptedEngine]:
    async with anyio.create_task_group() as tasks:
        engine = ScriptedEngine()
        await Stranger(engine, tasks).start()
        yield engine
        engine.kill()


def layout_of(*urls: str, own: int = 0) -> ProcessLayout:
    external = tuple(ExternalEngine(f"external-{n}", url, "broadcast") for n, url in enumerate(urls))
    return replace(cpu_layout(own), external=external)


def alive(monkeypatch: pytest.MonkeyPatch, *owners: str) -> None:
    """Jobs of these names live, and no others."""
    monkeypatch.setattr(claims, "is_alive", lambda owner: owner in owners)


async def taken_by(engine: ScriptedEngine, owner: str) -> None:
    async with new_session() as session:
        await claims.claim(EngineApi("external-7", engine.url, session, owner=owner), owner, 5.0)


OTHER = "elsewhere:/runs/other"


async def test_an_engine_of_another_job_is_refused_by_the_name_of_that_job_and_left_alone(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive(monkeypatch, OTHER)
    async with one_stranger() as engine:
        await taken_by(engine, OTHER)
        engine.generation.stamp(stamp := f"0.4@external-7@{OTHER}")
        await engine.generation.pause("retract")  # by its owner, in the middle of an update
        engine.weights.session = True
        async with start_fleet(0, layout=layout_of(engine.url)) as fleet:
            with pytest.raises(EngineError, match=r"belongs to the job in /runs/other on elsewhere"):
                await fleet.controller.wait_ready()
        assert engine.generation.version == stamp and engine.paused and engine.session and engine.sessions
        assert not {"abort_request", "continue_generation", "generate"} & set(engine.calls)


async def test_of_two_jobs_that_come_at_once_one_gets_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"here:/runs/{number}" for number in range(4)]
    alive(monkeypatch, *names)
    refused: list[str] = []
    async with one_stranger() as engine, anyio.create_task_group() as tasks:

        async def come(name: str) -> None:
            try:
                await taken_by(engine, name)
            except EngineError as error:
                refused.append(str(error))

        for name in names:
            tasks.start_soon(come, name)
        with anyio.fail_after(10):
            await eventually(lambda: len(refused) == 3)
    owner = owner_in(engine.generation.version)
    assert owner in names and all(f"the job in {owner.partition(':')[2]}" in message for message in refused)


async def test_what_a_killed_job_left_is_taken_over(start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    alive(monkeypatch)
    async with one_stranger() as engine:
        await taken_by(engine, OTHER)
        async with start_fleet(0, layout=layout_of(engine.url)) as fleet:
            fleet.engines.append(engine)
            await publish(fleet, "0.0", None)
            assert serves(fleet, 0, "0.0")
            assert str(owner_in(engine.generation.version)).endswith(str(fleet.controller._builder._config.run.dir))
            await fleet.controller.dispose()
        assert engine.generation.version == "free" and not engine.sessions
        await taken_by(engine, OTHER)


@pytest.mark.parametrize("when", ["between updates", "in an update"])
async def test_an_intruder_is_noticed_and_its_weights_are_never_published_as_ours(
    start_fleet: StartFleet, when: str
) -> None:
    async with beside_one_stranger(start_fleet) as (fleet, stranger):
        await publish(fleet, "0.0", None)

        async def intrude() -> None:
            stranger.engine.generation.stamp(f"0.0@external-0@{OTHER}")

        if when == "between updates":
            await intrude()
        else:
            stranger.engine.script(instead("end_weight_update", intrude))
        await publish(fleet, "0.1", None)
        assert serves(fleet, 0, "0.1") and fleet.router.workers == [fleet.engines[0].url]
        told = [event for event in fleet.events.recent if event["kind"] == "engine_state"]
        assert any(e["engine"] == "external-0" and "somebody else uses it" in str(e["reason"]) for e in told)


async def test_probes_notice_an_intruder_too(start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    alive(monkeypatch, OTHER)
    async with beside_one_stranger(start_fleet, **FAST) as (fleet, stranger):
        await publish(fleet, "0.0", None)
        stranger.engine.generation.stamp(f"0.0@external-0@{OTHER}")
        await eventually(lambda: fleet.router.workers == [fleet.engines[0].url])
        await fleet.controller.dispose()
        assert OTHER in stranger.engine.generation.version, "what another job has taken is left to it"


async def test_an_engine_of_another_model_is_refused_before_anything_is_written_into_it(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100, "hidden_size": 8, "model_type": "qwen3"}))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text(json.dumps({"vocab_size": 120, "hidden_size": 8, "model_type": "qwen3"}))
    async with one_stranger() as engine:
        engine.initial_model_path = str(theirs)
        async with start_fleet(0, layout=layout_of(engine.url)) as fleet:
            with pytest.raises(EngineError, match=r"serves another model \(vocab_size is 120 there and 100 here\)"):
                await fleet.controller.wait_ready()
        assert set(engine.calls) <= {"model_info", "server_info"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"package_version": "0.4.1"}, r"runs SGLang 0\.4\.1, and this job needs"),
        ({"fault": refuse("server_info", 404, times=None)}, "is no engine that this job can use: .*404"),
        ({"fault": garbage("model_info", times=None)}, "is no engine that this job can use"),
    ],
    ids=["another version", "no such route", "another server"],
)
async def test_what_no_waiting_changes_is_told_at_once(
    start_fleet: StartFleet, change: dict[str, Any], told: str
) -> None:
    async with one_stranger() as engine:
        if "fault" in change:
            engine.script(change["fault"])
        else:
            engine.package_version = change["package_version"]
        async with start_fleet(0, layout=layout_of(engine.url)) as fleet:
            with anyio.fail_after(10), pytest.raises(EngineError, match=told):
                await fleet.controller.wait_ready()


async def test_the_job_begins_with_engines_that_answer_and_keeps_asking_for_the_rest(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_keeper, "ABSENT_S", 0.3)
    async with one_stranger() as there, anyio.create_task_group() as tasks:
        late = Stranger(ScriptedEngine(), tasks)
        await late.start()
        late.engine.kill()
        await eventually(lambda: late.engine._runner is None)
        layout = layout_of(there.url, late.engine.url)
        async with start_fleet(0, layout=layout, engine={"start_timeout_s": 2.0}) as fleet:
            fleet.engines += [there, late.engine]
            with anyio.fail_after(10):
                await publish(fleet, "0.0", None)
            assert serves(fleet, 0, "0.0")
            await fleet.controller.recover_updatable_engines()
            await anyio.sleep(2.5)  # past the time that a start may take
            assert fleet.states() == ["serving", "starting"] and not fleet.failures
            await late.start()
            await eventually(lambda: fleet.states()[1] == "pending_weights")
            await publish(fleet, "0.1", None)
            assert serves(fleet, 0, "0.1") and serves(fleet, 1, "0.1")
        late.engine.kill()
