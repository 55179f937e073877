"""Run: a training loop, stage by stage.

    run = await start_run(job)
    for step in run.steps():
        batch = await run.next_batch(step)       # generate
        metrics = await run.train(step, batch)   # train
        await run.commit(step)
        await run.checkpoint(step)
        await run.publish(step)
        run.record_step(step, metrics)
    await run.finish()

A step is a number from 0 on, the same as the rollout id of its batch. The loop decides which stages a step has, and in
which order. Each stage counts its time as a phase of the step.

Invariants
- From `start` on a job that a signal stops saves what it has trained, whichever stages its loop has.
- `finish` saves and publishes the last trained step where the loop has not done so.
- Whether the job was asked to stop is looked at before each step, so a step that was begun is finished.
- An evaluation that fails is a skipped point with a reason, never the end of the job. One that goes on beside the loop
  (`evaluations.py`) is finished by `finish`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from asyncrl.config.checks.no_effect import unused_staleness
from asyncrl.config.sections.training import TrainConfig
from asyncrl.data.staleness import overlaps
from asyncrl.errors import ConfigError, NonFiniteError, RunDirectoryError, counted
from asyncrl.observability.events import CheckpointWritten, FaultSeen
from asyncrl.rollout.scheduling.deliveries import TRAINER
from asyncrl.run.checkpoints import Checkpoints
from asyncrl.run.evaluations import Evaluations
from asyncrl.run.job import Job
from asyncrl.run.republication import Republication
from asyncrl.run.turns import Halves
from asyncrl.run.warm_up import warm_up
from asyncrl.tasks import RunningTask
from asyncrl.training.agreement import disagreement

if TYPE_CHECKING:  # torch stays out of the driver until the engines are on their way
    from asyncrl.data.batch import RolloutBatch
    from asyncrl.rollout.evaluation import EvalReport
    from asyncrl.run.parts import RolloutComponents, RolloutPart, TrainingPart
    from asyncrl.weights.publication import PublicationReport


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """A snapshot of a run."""

    trained: int
    """Steps that were trained and committed, those before a resume included."""
    num_steps: int
    """Steps after which the run ends."""
    background: tuple[RunningTask, ...]
    """Work beside the loop."""
    pauses: tuple[str, ...]
    """Why the engines generate nothing now; empty where they may."""


class Run:
    """One attempt of a run, over parts that are built. Made by `start`."""

    def __init__(
        self, job: Job, components: RolloutComponents, trainer: TrainingPart, generates_ahead: bool, trainer_name: str
    ) -> None:
        """Use `start`."""
        self.job = job
        self.components = components
        self.engines, self.executor, per_epoch = components
        self.trainer = trainer
        self.first = 0
        """The first step of this attempt."""
        self.num_steps = planned_steps(job.config.train, per_epoch)
        """Steps after which the run ends, those before a resume included."""
        self._generates_ahead = generates_ahead
        self._trainer_name = trainer_name
        self._trained = self._published = 0
        """Steps that were committed, and steps whose weights were published."""
        self._publication: PublicationReport | None = None
        """Of the step in progress."""
        self._updates = self._skipped = 0
        """Optimizer steps that were taken, and that were skipped as loss or gradient were not finite."""
        self._disagreed = False
        """Whether the user was told that trainer and engine compute different models."""
        self._has_results = False
        """Whether a step of this attempt was committed or recorded."""
        self._halves = Halves(self.engines, trainer)
        self._checkpoints = Checkpoints(job, self._halves, self.executor, trainer_name)
        self._republication = Republication(self.engines, self._publish_trained, job.record.note)
        self._evaluations = Evaluations(
            job, self.engines, self.executor, self._republication, trained=lambda: self._trained
        )

    # start

    @classmethod
    async def start(
        cls,
        job: Job,
        components: RolloutComponents,
        trainer: TrainingPart,
        *,
        generates_ahead: bool = False,
        trainer_name: str = TRAINER,
    ) -> Run:
        """Returns when the first step may begin: restored, warmed up, and with engines that hold the trainer's weights.

        Args:
            generates_ahead: from the first batch on, engines generate as far ahead as `rollout.max_staleness` allows.
            trainer_name: the name of this trainer, where the executor was made for several.

        Raises ConfigError where the number of steps is unknown or engines cannot generate ahead; CheckpointError and
        DataError for a checkpoint that the run cannot go on from; EngineError and WeightUpdateError as the parts do.
        """
        if generates_ahead:
            job.turns.check_overlap()
        elif (unused := unused_staleness(job.config)) is not None:
            job.record.note(unused)
        run = cls(job, components, trainer, generates_ahead, trainer_name)
        with job.record.phase("startup"):
            await run._begin()
        job.record.start(run.num_steps, run.first)
        return run

    async def _begin(self) -> None:
        job = self.job
        job.pauses.add(self.executor)
        overlapping = self._generates_ahead and overlaps(job.config)
        threads = job.layout.trainer_threads(overlaps=overlapping)
        self.first = self._trained = self._published = await self.trainer.init(threads=threads)
        republishing = job.background.start("republication of lost weights", self._republication.serve)
        job.disposal.push_async_callback(republishing.end)
        job.disposal.push_async_callback(self._evaluations.aclose)
        job.on_stop_now.extend([republishing.end, self._checkpoints.save_now])  # in this order: both use the trainer
        await self._checkpoints.resume(self.first)
        await anyio.to_thread.run_sync(job.record.continue_after, self.first)
        await warm_up(job, self.trainer)
        await self.engines.wait_ready()
        await job.turns.publish(self._halves, None)  # no engine serves before it holds these weights

    async def add_executor(self, executor: RolloutPart) -> None:
        """From now on `executor`, a started one in front of the same engines, is a part of the run.

        It hears of every pause and of all weights, and is in every checkpoint; where the run was resumed, it goes on
        where it was. The trainer trains its batches at the steps of the run: `executor.get(step)`, then
        `executor.commit(step)`. Raises ConfigError for a second executor of one name, DataError and CheckpointError as
        a resume does.
        """
        self.job.pauses.add(executor)
        await self._checkpoints.add(executor)

    # the stages of a step

    def steps(self) -> Iterator[int]:
        """The steps that are left; ends early where the job was asked to stop."""
        for step in range(self.first, self.num_steps):
            if self.job.stop.requested:
                return
            yield step

    def evaluation_due(self, step: int) -> bool:
        """Whether `eval` asks for an evaluation before `step`."""
        return self.job.config.eval.due(step, self.first)

    async def evaluate(self, step: int, hf_dir: Path | None = None, *, last: bool = False) -> EvalReport | None:
        """Evaluates the published policy, or the model in directory `hf_dir`, as a point after `step` trained steps.

        On the training engines it returns the point. Engines of `eval.fleet` and `eval.function` go on beside the loop,
        and None is returned; `eval.if_busy` says what happens while the evaluation before is under way, for which the
        `last` one always waits. An `hf_dir` needs one of the two; its result is a note and an event, and no point.
        """
        with self.job.record.phase("eval"):
            return await self._evaluations.evaluate(step, hf_dir, last=last)

    async def next_batch(self, step: int) -> RolloutBatch:
        """The batch of `step`; waits until it is generated and scored.

        Raises EngineError where no engine will serve, and as `RolloutExecutor.get` does.
        """
        with self.job.record.phase("wait" if self._generates_ahead else "generate"):
            if self._generates_ahead and step == self.first:
                self.executor.generate_ahead(self.first, self.num_steps)
            return await self._republication.during(partial(self._get, step))

    @asynccontextmanager
    async def trainers_turn(self) -> AsyncIterator[TrainingPart]:
        """The trainer may compute in the body, with any of its commands; see `train` for the usual one.

        On GPUs that engines share with the trainer, engines leave them first, and come back with the next publication.
        """
        with self.job.record.phase("train"):
            await self.job.turns.trainers_turn(self._halves)
            yield self.trainer

    async def train(self, step: int, batch: RolloutBatch) -> dict[str, float]:
        """Trains on the batch of `step`, as `train` of the configuration says; returns metrics.

        Raises StalenessError for a batch that is too old, TrainerError where a rank fails.
        """
        async with self.trainers_turn() as trainer:
            metrics = await trainer.train(step, batch)
        self._updates += int(metrics.get("train/updates", 0))
        self._skipped += int(metrics.get("train/skipped_updates", 0))
        told = None if self._disagreed else disagreement(metrics, self.job.layout.dtype)
        if told is not None:
            self._disagreed = True
            self.job.record.note(f"step {step + 1}: {told}")
        return metrics

    async def commit(self, step: int) -> None:
        """Tells the executor that the batch of `step` is trained; its groups have ended.

        A run that this one overwrites is erased beside the training from the first step on.
        """
        with self.job.record.phase("train"):
            await self.executor.commit(step, self._trainer_name)
        self._trained = step + 1
        self._let_former_go()

    async def checkpoint(self, step: int) -> None:
        """Saves the run after `step` where `checkpoint.every` says so, and after the last step. Call it after `commit`.

        It is written beside the training; only that of the last step is waited for.
        """
        last = self.job.stop.requested or step + 1 == self.num_steps
        await self._checkpoints.save_if_due(step, last=last)

    def publication_due(self, step: int) -> bool:
        """Whether `train.update_weights_interval` asks for a publication after `step`."""
        return self.job.config.train.publishes(step)

    async def publish(self, step: int) -> None:
        """Brings the engines to the weights after `step`. Raises WeightUpdateError where no engine gets them."""
        with self.job.record.phase("publish"):
            self._publication = await self.job.turns.publish(self._halves, step)
        self._published = step + 1

    def record_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Ends `step` in the account of the run, with the `metrics` of its training."""
        publication, self._publication = self._publication, None
        self.job.record.step(step + 1, self.executor.last_rollout, metrics, publication)
        self._let_former_go()

    # the end

    async def finish(self) -> None:
        """Ends the loop: last checkpoint, last publication, evaluation at the end and export, where they are due.

        After a loop that ended early too; not after one that failed. Where one of them fails, the evaluation under way
        still gives its point. Raises NonFiniteError where every optimizer step was skipped: nothing was trained, so
        nothing is exported.
        """
        if self.job.stop.requested and not self._trained:
            self.job.record.note("stopped before the first step: nothing was trained, so nothing is exported")
            return
        try:
            await self._save_results()
        finally:
            with self.job.record.phase("eval"):
                await self._evaluations.finish()

    async def _save_results(self) -> None:
        config = self.job.config
        if self._skipped and not self._updates:
            raise NonFiniteError(
                f"all {self._skipped} optimizer steps were skipped, as loss or gradient were not finite "
                '(train.on_nonfinite = "skip"), so nothing was trained; the log says what was extreme in each batch'
            )
        await self._checkpoints.save_last()
        if self._published < self._trained or self.job.turns.engines_wait:
            await self.publish(self._trained - 1)
        if config.eval.enabled and config.eval.at_end:
            await self.evaluate(self._trained, last=True)
        if config.run.export:
            await self.export()

    async def export(self) -> None:
        """Writes the policy as a Hugging Face directory into the run directory; without a trainer there is none."""
        job, directory = self.job, self.job.directory.export
        if job.config.debug.rollout_only:
            return
        started = anyio.current_time()
        with job.record.phase("export"):
            await job.turns.trainers_turn(self._halves)
            await self.trainer.export_hf(directory)
        seconds = anyio.current_time() - started
        job.events.emit(CheckpointWritten(step=self._trained, path=str(directory), seconds=seconds))
        job.record.exported(directory)

    def statistics(self) -> RunStatistics:
        """How far the run is, and what goes on beside its loop."""
        return RunStatistics(self._trained, self.num_steps, self.job.background.running, self.job.pauses.reasons)

    # what the stages do

    async def _get(self, step: int) -> RolloutBatch:
        await self.engines.prepare_rollout(step)
        return await self.executor.get(step, self._trainer_name)

    def _let_former_go(self) -> None:
        """Begins to erase a run that this one overwrites. What resists is told, and costs the job nothing."""
        if self._has_results:
            return
        self._has_results = True
        try:
            if self.job.directory.let_former_go():
                self.job.background.start("erasure of a run that was overwritten", self._erase_former)
        except RunDirectoryError as error:
            self._tell_left(str(error))

    async def _erase_former(self) -> None:
        self._tell_left(await anyio.to_thread.run_sync(self.job.directory.erase_former, abandon_on_cancel=True))

    def _tell_left(self, told: str) -> None:
        if told:
            self.job.record.note(told)
            self.job.events.emit(FaultSeen(component="run directory", what=told))

    async def _publish_trained(self) -> None:
        """Publishes what the trainer holds."""
        await self.job.turns.publish(self._halves, self._trained - 1)
        self._published = self._trained


def planned_steps(config: TrainConfig, num_rollout_per_epoch: int | None) -> int:
    """Steps after which a run ends. Raises ConfigError where nothing says how many there are."""
    if config.num_steps is not None:
        return config.num_steps
    if not num_rollout_per_epoch:
        raise ConfigError(
            f"train.num_steps: it is none, so the run takes {counted(config.num_epochs, 'pass', 'passes')} over the "
            "data (train.num_epochs), but RolloutComponents.num_rollout_per_epoch is "
            f"{num_rollout_per_epoch}: nothing says how many batches a pass has; set train.num_steps, or build the "
            "components with the number that executor.get_num_rollout_per_epoch() returns"
        )
    return config.num_epochs * num_rollout_per_epoch
