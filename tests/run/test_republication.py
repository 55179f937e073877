"""All engines lose the weights and no copy is left: the trainer, which has them, publishes again and the job goes on.

The controller, the run, the publication and its gloo group are real; engines are scripted, trainer and executor do what
a run asks of them here and no more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from asyncrl.components import Run
from asyncrl.errors import AsyncRLError, EngineError, RolloutError, WeightUpdateError
from asyncrl.inference.sglang.engine_api import ProbeAnswer
from asyncrl.rollout.evaluation import EvalReport, skipped_report
from asyncrl.rollout.scheduling.deliveries import TRAINER
from asyncrl.weights.publication import PublicationReport
from tests.inference.conftest import StartFleet, anyio_backend, eventually, start_fleet
from tests.inference.transaction_rig import Rig, rig
from tests.run.jobs import a_job, started

pytestmark = pytest.mark.anyio
__all__ = ["anyio_backend", "start_fleet"]  # fixtures

KV = {"kv_cache", "cuda_graph"}
BOUND_S = 20.0
"""For what takes two restarts and a publication, a second or two; two cores that are overbooked take longer."""


class Trainer:
    """Publishes what it holds; on shared GPUs it must find room."""

    resumed = None

    def __init__(self, rig: Rig, shares: bool, first: int) -> None:
        self.rig, self.shares, self.first = rig, shares, first
        self.on_gpu = False

    async def init(self, *, threads: int | None = None) -> int:
        await self.onload()
        return self.first

    async def update_weights(self, rollout_id: int | None = None) -> PublicationReport:
        assert self.on_gpu or not self.shares
        return await self.rig.publish(f"0.{self.first if rollout_id is None else rollout_id + 1}")

    async def onload(self) -> None:
        for engine in self.rig.fleet.engines if self.shares else ():
            assert not engine.alive or engine.offloaded >= KV, (
                "an engine and the trainer have no room beside each other"
            )
        self.on_gpu = True

    async def offload(self, *, keep_weights: bool = False) -> None:
        self.on_gpu = self.on_gpu and keep_weights


class Executor:
    """A batch is one token, an evaluation another."""

    name = ""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.versions: list[str] = []
        self.before: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Happens once, when generation has begun."""

    async def get(self, rollout_id: int, trainer: str = TRAINER) -> ProbeAnswer:
        if self.before is not None:
            before, self.before = self.before, None
            await before()
        while True:
            try:
                return await self.rig.fleet.controller._started.actor.routing.router.probe(None)
            except EngineError:
                await anyio.sleep(0.02)

    async def eval(self, step: int) -> EvalReport:
        return skipped_report(step, (await self.get(step)).meta_info.weight_version)

    def report_eval_skip(self, step: int, reason: str) -> EvalReport:
        raise AssertionError(reason)

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """As with weights.on_update = wait."""
        assert self.rig.fleet.controller.fleet().serves, "requests that nobody serves would be waited for"
        yield

    def set_weight_version(self, version: str) -> None:
        self.versions.append(version)

    def engines_paused(self) -> None: ...

    def engines_resumed(self) -> None: ...


class Played:
    """A run that has `first` steps behind it; its engines hold the weights of version `0.<first>`."""

    def __init__(self, rig: Rig, run: Run) -> None:
        self.rig, self.run = rig, run
        self.trainer: Any = run.trainer
        self.executor: Any = run.executor
        self.notes: list[str] = run.job.record.notes  # type: ignore[attr-defined]

    async def lose_all(self) -> None:
        for number in range(len(self.rig.fleet.engines)):
            await self.rig.fleet.host.kill(f"engine-{number}")

    async def gather(self, rollout_id: int) -> ProbeAnswer:
        with anyio.fail_after(BOUND_S):
            batch: Any = await self.run.next_batch(rollout_id)
        assert isinstance(batch, ProbeAnswer)
        return batch

    async def evaluate(self) -> None:
        with anyio.fail_after(BOUND_S):
            await self.run.evaluate(0)

    def published(self) -> list[str]:
        return [event["version"] for event in self.rig.fleet.events.recent if event["kind"] == "weights_published"]


@asynccontextmanager
async def played(
    start_fleet: StartFleet, engines: int, *, shares: bool = False, first: int = 0
) -> AsyncIterator[Played]:
    async with rig(start_fleet, engines=engines, restarts=5, colocated=shares) as it:
        trainer, job = Trainer(it, shares, first), a_job(colocated=shares)
        it.pauses = job.pauses
        if shares:
            spawn = it.fleet.host.spawn

            async def alone(spec: Any) -> int:
                assert not trainer.on_gpu, "an engine was started while the trainer had its GPU"
                return await spawn(spec)

            it.fleet.host.spawn = alone  # type: ignore[method-assign]
            await job.turns.make_room(it.fleet.controller)
        async with started(it.fleet.controller, Executor(it), trainer, job=job) as run:
            yield Played(it, run)


@pytest.mark.parametrize("shares", [False, True], ids=["GPUs of their own", "shared GPUs"])
@pytest.mark.parametrize("when", ["before generation", "during generation"])
async def test_engines_that_all_lost_the_weights_are_given_the_same_again(
    start_fleet: StartFleet, when: str, shares: bool
) -> None:
    async with played(start_fleet, 2, shares=shares, first=3) as play:
        if when == "before generation":
            await play.lose_all()
        else:
            play.executor.before = play.lose_all
        generation = await play.gather(3)
        assert generation.meta_info.weight_version == "0.3"
        assert play.published() == ["0.3", "0.3"] == play.executor.versions
        assert play.rig.complaints() == []
        assert len(play.notes) == 1 and "published again" in play.notes[0]
        assert (await play.gather(3)).meta_info.weight_version == "0.3"
        assert len(play.published()) == 2


async def test_an_evaluation_outlives_the_loss_of_all_engines(start_fleet: StartFleet) -> None:
    async with played(start_fleet, 1) as play:
        play.executor.before = play.lose_all
        await play.evaluate()
        assert play.published() == ["0.0", "0.0"]


async def test_one_engine_that_lives_is_enough_and_nothing_is_published_again(start_fleet: StartFleet) -> None:
    async with played(start_fleet, 2, first=3) as play:
        await play.rig.fleet.host.kill("engine-0")
        await play.gather(3)
        await eventually(lambda: play.rig.fleet.states() == ["pending_weights", "serving"])
        await play.gather(3)
        assert play.published() == ["0.3"]


async def test_the_loss_of_all_engines_in_the_trainers_turn_costs_a_start_and_not_the_job(
    start_fleet: StartFleet,
) -> None:
    async with played(start_fleet, 1, shares=True) as play:
        for rollout_id in range(2):
            assert (await play.gather(rollout_id)).meta_info.weight_version == f"0.{rollout_id}"
            async with play.run.trainers_turn():
                if rollout_id == 0:
                    await play.lose_all()
                    await eventually(lambda: play.rig.fleet.states() == ["dead"])
            with anyio.fail_after(BOUND_S):
                await play.run.publish(rollout_id)
            assert play.rig.serves(0, f"0.{rollout_id + 1}") and play.rig.complaints() == []
        assert play.rig.fleet.engines[0].lives == 2
        assert play.published() == ["0.0", "0.1", "0.2"]


async def test_what_goes_wrong_beside_the_engines_is_raised_as_it_is(start_fleet: StartFleet) -> None:
    async with played(start_fleet, 1, first=3) as play:

        async def fail() -> None:
            raise AsyncRLError("the data has ended")

        play.executor.before = fail
        with pytest.raises(AsyncRLError, match="the data has ended"):
            await play.gather(3)


async def test_a_publication_that_fails_once_more_ends_the_wait_for_a_batch(start_fleet: StartFleet) -> None:
    async with played(start_fleet, 1, first=3) as play:

        async def broken(rollout_id: int | None = None) -> None:
            raise AsyncRLError("the trainer is gone")

        play.trainer.update_weights = broken
        play.executor.before = play.lose_all
        with pytest.raises(AsyncRLError, match="the trainer is gone"):
            await play.gather(3)


@pytest.mark.parametrize("step", ["onload", "update_weights"])
async def test_an_evaluation_that_fails_meanwhile_leaves_the_publication_to_its_end(
    start_fleet: StartFleet, step: str
) -> None:
    """Cancelled halfway, engines would keep requests for memory that nobody gives back to them."""
    async with played(start_fleet, 1, shares=True) as play:
        begun, take = anyio.Event(), getattr(play.trainer, step)

        async def noted(*args: Any) -> Any:
            begun.set()
            await anyio.sleep(0.05)
            return await take(*args)

        async def fail(_: int) -> EvalReport:
            await play.lose_all()
            await begun.wait()
            raise RolloutError("nobody answers")

        setattr(play.trainer, step, noted)
        play.executor.eval, play.executor.report_eval_skip = fail, skipped_report
        await play.evaluate()
        assert play.published() == ["0.0", "0.0"]
        assert (await play.gather(0)).meta_info.weight_version == "0.0"


async def test_a_publication_that_failed_beside_an_evaluation_is_made_up_for_before_the_next_batch(
    start_fleet: StartFleet,
) -> None:
    async with played(start_fleet, 1, shares=True) as play:
        update = play.trainer.update_weights

        async def fail_once(rollout_id: int | None = None) -> None:
            play.trainer.update_weights = update
            raise WeightUpdateError("the transfer broke")

        play.trainer.update_weights = fail_once
        play.executor.before, play.executor.report_eval_skip = play.lose_all, skipped_report
        await play.evaluate()
        assert play.rig.fleet.states() == ["pending_weights"], "the GPU is theirs again"
        assert (await play.gather(0)).meta_info.weight_version == "0.0"
        assert play.rig.complaints() == []


async def test_where_nobody_can_publish_again_the_loop_is_not_kept_busy_with_it(start_fleet: StartFleet) -> None:
    async with played(start_fleet, 1, first=3) as play:

        async def nothing(rollout_id: int | None = None) -> None:
            asked.append(rollout_id)
            assert len(asked) < 100, "the event loop does nothing else"

        asked: list[int | None] = []
        update, play.trainer.update_weights = play.trainer.update_weights, nothing

        async def lose_and_come_back() -> None:
            await play.lose_all()
            await eventually(lambda: bool(asked))
            await anyio.wait_all_tasks_blocked()
            await update(2)

        play.executor.before = lose_and_come_back
        assert (await play.gather(3)).meta_info.weight_version == "0.3"
        assert asked == [2]


async def test_a_signal_that_comes_while_weights_are_published_again_leaves_the_trainer_to_the_checkpoint(
    start_fleet: StartFleet,
) -> None:
    async with played(start_fleet, 1) as play:
        controller, begun = play.rig.fleet.controller, anyio.Event()

        async def hang(rollout_id: int | None = None) -> None:
            lease = await controller.begin_weight_update("0.0")
            begun.set()
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await controller.abort_weight_update(lease.lease_id, {}, untouched=True)

        play.trainer.update_weights = hang
        play.executor.before = play.lose_all
        async with anyio.create_task_group() as loops:
            loops.start_soon(play.run.next_batch, 0)
            with anyio.fail_after(BOUND_S):
                await begun.wait()
            loops.cancel_scope.cancel()
        end_republication, _ = play.run.job.on_stop_now
        with anyio.fail_after(BOUND_S):
            await end_republication()
        assert controller.statistics().open_lease is None
        assert play.run.statistics().background == ()
