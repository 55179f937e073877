"""What a loop and a trainer may rely on from a controller: real (over scripted engines) and fake alike."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from safetensors.torch import save_file

from asyncrl.data.fleet import EngineState, FleetView, UpdateAck, UpdateLease
from asyncrl.errors import EngineError, EnginesLostError, WeightUpdateError
from asyncrl.inference.controller import InferenceController
from tests.contracts.fake_controller import FakeController
from tests.inference.conftest import Fleet, StartFleet, anyio_backend, cpu_layout, eventually, start_fleet
from tests.inference.test_models import beside
from tests.inference.updates.test_weight_updates import tensors_of
from tests.scripted import ScriptedEngine, ScriptedRouter

pytestmark = pytest.mark.anyio
__all__ = ["anyio_backend", "start_fleet"]  # fixtures

Start = Callable[..., AbstractAsyncContextManager["Subject"]]


class Subject:
    """A controller of two engines, and what a test needs besides its public methods."""

    def __init__(
        self, controller: Any, deliver: Callable[[str], None], lose: Callable[[str], Awaitable[None]], checkpoint: Path
    ) -> None:
        self.controller = controller
        self.deliver = deliver
        self.lose = lose
        self.checkpoint = checkpoint
        """Weights that the engines can load."""

    async def publish(self, version: str, directory: Path | None = None) -> None:
        lease = await self.controller.begin_weight_update(version)
        self.deliver(version)
        await self.controller.commit_weight_update(lease.lease_id, acks(lease), directory)

    def states(self) -> list[EngineState]:
        return [status.state for status in self.controller.fleet().engines]


def acks(lease: UpdateLease, *without: str) -> list[UpdateAck]:
    return [UpdateAck(e.engine_id, e.generation) for e in lease.engines if e.engine_id not in without]


@pytest.fixture(params=["fake", "real"])
def start(request: pytest.FixtureRequest, start_fleet: StartFleet, tmp_path: Path) -> Start:
    @asynccontextmanager
    async def fake(*, colocated: bool = False, eval_fleet: bool = False) -> AsyncIterator[Subject]:
        controller = FakeController(engines=2, colocated=colocated, eval_fleet=eval_fleet)

        async def lose(engine_id: str) -> None:
            controller.lose(engine_id)

        yield Subject(controller, lambda version: None, lose, tmp_path / "checkpoint")
        await controller.dispose()

    @asynccontextmanager
    async def real(*, colocated: bool = False, eval_fleet: bool = False) -> AsyncIterator[Subject]:
        def prepare(fleet: Fleet) -> None:
            if eval_fleet:
                fleet.host.servers |= {"eval-0": ScriptedEngine(), "router-eval": ScriptedRouter()}

        with_eval: dict[str, Any] = {
            "layout": replace(cpu_layout(2), beside={"eval": beside("eval", 1)}),
            "eval": {"fleet": {"num_engines": 1}},
        }
        settings = with_eval if eval_fleet else {"colocated": colocated}
        async with start_fleet(2, restarts=3, prepare=prepare, **settings) as fleet:
            (tmp_path / "checkpoint").mkdir()
            save_file(tensors_of(fleet, "0.7"), tmp_path / "checkpoint" / "model.safetensors")

            def deliver(version: str) -> None:
                for engine in fleet.engines:
                    engine.weights.load(tensors_of(fleet, version).items())

            async def lose(engine_id: str) -> None:
                before = {s.endpoint.engine_id: s.endpoint.generation for s in fleet.controller.fleet().engines}
                await fleet.host.kill(engine_id)
                number = int(engine_id[-1])

                def noticed() -> bool:
                    status = fleet.controller.fleet().engines[number]
                    return status.state is EngineState.DEAD or status.endpoint.generation > before[engine_id]

                await eventually(noticed)

            await fleet.controller.wait_ready()
            yield Subject(fleet.controller, deliver, lose, tmp_path / "checkpoint")

    return fake if request.param == "fake" else real


async def test_nothing_can_be_rolled_out_before_weights_were_published(start: Start) -> None:
    async with start() as subject:
        assert subject.states() == [EngineState.PENDING_WEIGHTS] * 2
        with pytest.raises(EngineError):
            await subject.controller.prepare_rollout(0)
        with pytest.raises(EngineError):
            await subject.controller.prepare_eval()


async def test_a_published_version_is_what_every_engine_serves(start: Start) -> None:
    async with start() as subject:
        for version in ("0.0", "0.1"):
            await subject.publish(version)
            view = subject.controller.fleet()
            assert view.published_version == version
            assert {(s.state, s.version) for s in view.engines} == {(EngineState.SERVING, version)}
            await subject.controller.prepare_rollout(0)
            await subject.controller.prepare_eval()


async def test_one_update_at_a_time_and_each_ends_once(start: Start) -> None:
    async with start() as subject:
        lease = await subject.controller.begin_weight_update("0.0")
        assert subject.states() == [EngineState.UPDATING] * 2
        assert (lease.version, len(lease.engines)) == ("0.0", 2)
        assert lease.paused_at <= lease.deadline
        with pytest.raises(WeightUpdateError, match="is open"):
            await subject.controller.begin_weight_update("0.1")
        subject.deliver("0.0")
        await subject.controller.commit_weight_update(lease.lease_id, acks(lease))
        with pytest.raises(WeightUpdateError):
            await subject.controller.commit_weight_update(lease.lease_id, acks(lease))
        await subject.controller.abort_weight_update(lease.lease_id, {})  # of an ended lease: nothing
        assert subject.controller.fleet().published_version == "0.0"
        assert subject.states() == [EngineState.SERVING] * 2


async def test_an_update_in_which_nothing_was_sent_leaves_the_old_version(start: Start) -> None:
    async with start() as subject:
        await subject.publish("0.0")
        lease = await subject.controller.begin_weight_update("0.1")
        await subject.controller.abort_weight_update(lease.lease_id, {}, untouched=True)
        view = subject.controller.fleet()
        assert view.published_version == "0.0"
        assert {(s.state, s.version) for s in view.engines} == {(EngineState.SERVING, "0.0")}


async def test_an_update_that_may_have_torn_weights_takes_its_engines_out_until_the_next(start: Start) -> None:
    async with start() as subject:
        await subject.publish("0.0")
        lease = await subject.controller.begin_weight_update("0.1")
        await subject.controller.abort_weight_update(lease.lease_id, {})
        assert {(s.state, s.version) for s in subject.controller.fleet().engines} == {
            (EngineState.PENDING_WEIGHTS, None)
        }
        await subject.publish("0.2")
        assert subject.states() == [EngineState.SERVING] * 2


async def test_an_engine_that_did_not_acknowledge_does_not_serve_and_comes_back(start: Start) -> None:
    async with start() as subject:
        lease = await subject.controller.begin_weight_update("0.0")
        subject.deliver("0.0")
        await subject.controller.commit_weight_update(lease.lease_id, acks(lease, "engine-1"))
        served = {s.endpoint.engine_id: s.version for s in subject.controller.fleet().engines}
        assert served == {"engine-0": "0.0", "engine-1": None}
        await eventually(lambda: subject.states()[1] is EngineState.PENDING_WEIGHTS)
        assert subject.controller.fleet().engines[1].endpoint.generation == 1
        await subject.publish("0.1")
        assert subject.states() == [EngineState.SERVING] * 2


async def test_an_ack_of_an_older_process_is_void(start: Start) -> None:
    async with start() as subject:
        lease = await subject.controller.begin_weight_update("0.0")
        stale = [UpdateAck(engine.engine_id, engine.generation - 1) for engine in lease.engines]
        with pytest.raises(WeightUpdateError):
            await subject.controller.commit_weight_update(lease.lease_id, stale)
        assert subject.controller.fleet().published_version is None


async def test_engines_are_stopped_and_started_while_a_job_runs_but_not_the_last(start: Start) -> None:
    async with start() as subject:
        controller = subject.controller
        await subject.publish("0.0")
        await controller.stop_cell("engine-0")
        assert subject.states() == [EngineState.STOPPED, EngineState.SERVING]
        await controller.prepare_rollout(1)
        with pytest.raises(EngineError, match="the last engine that serves"):
            await controller.stop_cell("engine-1")
        with pytest.raises(EngineError, match="engine-1 cannot be started: it is serving"):
            await controller.start_cell("engine-1")
        with pytest.raises(EngineError, match="there is no engine engine-7"):
            await controller.start_cell("engine-7")
        await controller.start_cell("engine-0")
        await eventually(lambda: subject.states()[0] is EngineState.PENDING_WEIGHTS)
        assert controller.fleet().engines[0].endpoint.generation == 1
        await subject.publish("0.1")
        assert subject.states() == [EngineState.SERVING] * 2


async def test_engines_that_share_gpus_give_memory_up_and_serve_again_once_they_have_weights(start: Start) -> None:
    async with start(colocated=True) as subject:
        controller = subject.controller
        await controller.offload_kv()
        await controller.onload_weights()
        await subject.publish("0.0")
        assert subject.states() == [EngineState.OFFLOADED] * 2
        await controller.onload_kv()
        assert {(s.state, s.version) for s in controller.fleet().engines} == {(EngineState.SERVING, "0.0")}
        await controller.offload()
        assert {(s.state, s.version) for s in controller.fleet().engines} == {(EngineState.OFFLOADED, None)}
        assert not controller.fleet().needs_publication
        with pytest.raises(WeightUpdateError, match=r"offloaded; await onload_weights\(\) first"):
            await controller.begin_weight_update("0.1")
        assert subject.states() == [EngineState.OFFLOADED] * 2
        await controller.onload()
        assert subject.states() == [EngineState.PENDING_WEIGHTS] * 2
        assert controller.fleet().needs_publication
        await subject.publish("0.0")
        assert subject.states() == [EngineState.SERVING] * 2
        with pytest.raises(EngineError, match="unknown memory tags"):
            await controller.offload(("kv",))


async def test_engines_on_a_cpu_are_not_asked_for_memory(start: Start) -> None:
    async with start() as subject:
        for ask in (subject.controller.offload, subject.controller.onload):
            with pytest.raises(EngineError, match="engines on CPU cannot release memory"):
                await ask()


async def test_engines_lost_in_the_trainers_turn_come_back_after_it_and_a_publication_says_so(start: Start) -> None:
    async with start(colocated=True) as subject:
        controller = subject.controller
        await subject.publish("0.0")
        await controller.offload()
        for engine_id in ("engine-0", "engine-1"):
            await subject.lose(engine_id)
        assert subject.states() == [EngineState.DEAD] * 2
        with pytest.raises(EnginesLostError), anyio.fail_after(10):
            await controller.begin_weight_update("0.1")
        await controller.onload()
        await controller.wait_updatable()
        await eventually(lambda: subject.states() == [EngineState.PENDING_WEIGHTS] * 2)
        await subject.publish("0.1")
        assert subject.states() == [EngineState.SERVING] * 2


async def test_it_says_when_only_a_publication_helps(start: Start) -> None:
    async with start() as subject:
        controller = subject.controller
        await subject.publish("0.0")
        await subject.lose("engine-0")
        assert not controller.fleet().needs_publication
        await subject.lose("engine-1")
        with anyio.fail_after(10):
            await controller.wait_publication_needed()
        view = controller.fleet()
        assert view.needs_publication and not view.serves and view.published_version == "0.0"
        await eventually(lambda: subject.states() == [EngineState.PENDING_WEIGHTS] * 2)
        await subject.publish("0.0")
        view = controller.fleet()
        assert view.serves and not view.needs_publication
        assert {(s.state, s.version) for s in view.engines} == {(EngineState.SERVING, "0.0")}


async def test_a_copy_that_is_still_being_written_is_waited_for(start: Start) -> None:
    async with start(eval_fleet=True) as subject:
        controller = subject.controller
        lease = await controller.begin_weight_update("0.7")
        subject.deliver("0.7")
        due = anyio.current_time() + 60.0
        await controller.commit_weight_update(lease.lease_id, acks(lease), subject.checkpoint, copy_due=due)
        assert controller.copies_in_use() == {subject.checkpoint}
        for engine_id in ("engine-0", "engine-1"):
            await subject.lose(engine_id)
        await eventually(lambda: subject.states()[:2] == [EngineState.PENDING_WEIGHTS] * 2)
        assert not controller.fleet().needs_publication
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.pin_eval_fleet)
            await anyio.wait_all_tasks_blocked()
            assert subject.states()[:2] == [EngineState.PENDING_WEIGHTS] * 2
            controller.copy_written(subject.checkpoint.with_name("another"), complete=False)  # of an earlier commit
            controller.copy_written(subject.checkpoint, complete=True)
        await eventually(lambda: subject.states()[:2] == [EngineState.SERVING] * 2)
        controller.copy_written(subject.checkpoint, complete=False)  # its end was told
        assert controller.copies_in_use() == {subject.checkpoint}


async def test_a_copy_that_was_given_up_leaves_the_engines_to_a_publication(start: Start, tmp_path: Path) -> None:
    async with start(eval_fleet=True) as subject:
        controller = subject.controller
        lease = await controller.begin_weight_update("0.7")
        subject.deliver("0.7")
        due = anyio.current_time() + 60.0
        await controller.commit_weight_update(lease.lease_id, acks(lease), tmp_path / "published", copy_due=due)
        for engine_id in ("engine-0", "engine-1"):
            await subject.lose(engine_id)
        await eventually(lambda: subject.states()[:2] == [EngineState.PENDING_WEIGHTS] * 2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller.wait_publication_needed)
            await anyio.wait_all_tasks_blocked()
            controller.copy_written(tmp_path / "published", complete=False)
        assert controller.fleet().needs_publication and controller.copies_in_use() == frozenset()
        with pytest.raises(EngineError, match="no copy of published weights"):
            await controller.pin_eval_fleet()
        await subject.publish("0.7")
        assert controller.fleet().serves


async def test_weights_are_checked_against_a_snapshot(start: Start) -> None:
    async with start() as subject:
        check = subject.controller.check_weights
        await subject.publish("0.0")
        with pytest.raises(EngineError, match="no snapshot to compare with"):
            await check("compare")
        sums = await check("checksum")
        assert set(sums) == {"engine-0", "engine-1"} and sums["engine-0"] == sums["engine-1"]
        assert await check("snapshot") == {} == await check("compare")
        assert await check("reset_tensors") == {}
        with pytest.raises(EngineError, match=r"weights differ from the snapshot in .*layer"):
            await check("compare")


async def test_its_figures_follow_what_happened(start: Start) -> None:
    async with start() as subject:
        controller = subject.controller
        await subject.publish("0.0")
        lease = await controller.begin_weight_update("0.1")
        assert controller.statistics().open_lease == lease.lease_id
        await controller.abort_weight_update(lease.lease_id, {}, untouched=True)
        await subject.lose("engine-1")
        await eventually(lambda: subject.states() == [EngineState.SERVING, EngineState.PENDING_WEIGHTS])
        figures = controller.statistics()
        assert figures.engines == {"serving": 1, "pending_weights": 1}
        assert (figures.published_version, figures.open_lease) == ("0.0", None)
        assert (figures.updates_committed, figures.updates_aborted, figures.restarts) == (1, 1, 1)


async def test_engines_that_evaluate_are_pinned_and_their_copy_stays_in_use(start: Start, tmp_path: Path) -> None:
    async with start(eval_fleet=True) as subject:
        controller = subject.controller
        with pytest.raises(EngineError, match="no copy of published weights"):
            await controller.pin_eval_fleet()
        info = await controller.pin_eval_fleet(subject.checkpoint, "0.7")
        assert info.version == "0.7" and len(info.engine_urls) == 1 and info.router_url != controller.router_url
        await subject.publish("0.8", tmp_path / "published")
        assert controller.copies_in_use() == {subject.checkpoint, tmp_path / "published"}


async def test_what_is_not_configured_is_not_served(start: Start) -> None:
    async with start() as subject:
        assert subject.controller.copies_in_use() == frozenset()
        with pytest.raises(EngineError, match=r"add a section \[eval\.fleet\]"):
            await subject.controller.pin_eval_fleet(subject.checkpoint, "0.7")
        with pytest.raises(EngineError, match="no model is served as 'judge'"):
            subject.controller.model_url("judge")


def test_the_fake_is_called_as_the_real_one() -> None:
    def public(kind: type) -> dict[str, list[str]]:
        members = {name: member for name, member in vars(kind).items() if not name.startswith("_")}
        return {name: list(inspect.signature(m).parameters) for name, m in members.items() if inspect.isfunction(m)}

    real, fake = public(InferenceController), public(FakeController)
    assert {name: fake.get(name) for name in real} == real


async def test_what_leaves_a_controller_survives_a_journey_over_a_wire(start: Start) -> None:
    async with start() as subject:
        await subject.publish("0.0")
        view = subject.controller.fleet()
        assert msgspec.json.decode(msgspec.json.encode(view), type=FleetView) == view
        lease = await subject.controller.begin_weight_update("0.1")
        assert msgspec.json.decode(msgspec.json.encode(lease), type=UpdateLease) == lease
        await subject.controller.abort_weight_update(lease.lease_id, {}, untouched=True)


async def test_after_dispose_nothing_is_promised_and_disposing_again_is_nothing(start: Start) -> None:
    async with start() as subject:
        await subject.publish("0.0")
        await subject.controller.dispose()
        await subject.controller.dispose()
        assert subject.states() == [EngineState.STOPPED] * 2
        with pytest.raises(EngineError):
            await subject.controller.prepare_rollout(1)
        with pytest.raises(EngineError):
            await subject.controller.begin_weight_update("0.1")
