"""What every loop does around its steps: warm-up, publication, batches, evaluation, checkpoints, export.

Invariants
- An evaluation that fails is a skipped point with a reason, never the end.
- While engines generate, weights that all of them lost are published again where no copy is left to load: the trainer
  has them, and is idle then. The version says which they are, so it is the same again where they are the same.
- Where engines share the trainer's GPUs, weights are exported while the trainer's are on the device, and only then
  leave it; the rest of the trainer leaves before the engines' weights come back. The trainer's turn is a pause of the
  engines, and the executor hears of it: groups that no batch took yet wait in them meanwhile.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread

from asyncrl.errors import AsyncRLError, ConfigError, EnginesLostError
from asyncrl.job import Job
from asyncrl.observability.events import CheckpointWritten, FaultSeen, read_events
from asyncrl.rollout.group_events import GroupsRolledBack
from asyncrl.rollout.scheduling.deliveries import TRAINER
from asyncrl.rollout.scheduling.ledger import rolled_back

if TYPE_CHECKING:  # torch stays out of the driver until the engines are on their way
    from asyncrl.components import RolloutComponents
    from asyncrl.data.batch import RolloutBatch
    from asyncrl.data.supervised import SupervisedStream
    from asyncrl.inference.controller import InferenceController
    from asyncrl.rollout.evaluation import EvalReport
    from asyncrl.training.train_group import TrainGroup
    from asyncrl.weights.publication import PublicationReport

T = TypeVar("T")

_PROGRESS_TIMES = 20
"""The display hears so many times of the warm-up's progress."""


async def resume(job: Job, components: RolloutComponents, trainer: TrainGroup, first: int, name: str = TRAINER) -> None:
    """Where the trainer goes on from a checkpoint, as of `first` steps, so does the executor; after `trainer.init`.

    Groups that ended after that in earlier attempts are marked as rolled back in the event log. From now on a job that
    a signal stops is saved before it ends, if that fits into its grace. `name` is that of the trainer, where the
    executor was created for several. Raises CheckpointError for a checkpoint without the executor's part, DataError for
    other data than it was written with.
    """
    job.on_stop_now.append(partial(_checkpoint_now, job, components, trainer, name))
    reached = None
    if trainer.resumed is not None:
        reached = await components.rollout_executor.restore(trainer.resumed.extra, first)
        job.record.note(f"resumed from {trainer.resumed.path}")
    if job.run.attempt > 0:
        group_ids = await anyio.to_thread.run_sync(lambda: rolled_back(read_events(job.run.events), reached))
        if group_ids:
            job.events.emit(GroupsRolledBack(step=first, group_ids=group_ids))


async def checkpoint(
    job: Job, components: RolloutComponents, trainer: TrainGroup, rollout_id: int, *, last: bool
) -> None:
    """Saves trainer and executor after rollout `rollout_id` where `checkpoint.every` says so, and as the `last`.

    Call it after the commit, and before a publication takes a colocated trainer off its GPUs; and `last_checkpoint`
    after the loop. It is written beside the training; only the last one is waited for.
    """
    settings = job.config.checkpoint
    if settings.every and (last or settings.due(rollout_id + 1)):
        with job.record.phase("checkpoint"):
            await trainer.save_checkpoint(rollout_id, await components.rollout_executor.save(), wait=last)


async def last_checkpoint(job: Job, components: RolloutComponents, trainer: TrainGroup) -> None:
    """After the loop: saves its last step where that is not done, as a graceful stop came after its turn to be saved.

    Engines that share the trainer's GPUs leave them for that, and come back with the weights that they had.
    """
    if not job.config.checkpoint.every:
        return
    with job.record.phase("checkpoint"):
        if await _is_saved(trainer) or trainer.statistics().saving is not None:  # the latter where a disk hangs
            return
        rollout_id = trainer.statistics().step - 1
        await trainers_turn(job, components, trainer)
        await trainer.save_checkpoint(rollout_id, await components.rollout_executor.save(), wait=True)
        if job.layout.colocated:
            await publish(job, components, trainer, rollout_id)


async def _is_saved(trainer: TrainGroup) -> bool:
    """Whether what was trained is in a checkpoint, or there is none of it; one that is being written is waited for."""
    if trainer.statistics().saving == trainer.statistics().step:
        await trainer.finish_checkpoint()
    now = trainer.statistics()
    begun = 0 if trainer.resumed is None else trainer.resumed.step
    return now.step in (begun, now.checkpoint and now.checkpoint.step)


async def _checkpoint_now(job: Job, components: RolloutComponents, trainer: TrainGroup, name: str) -> None:
    """A signal has ended the loop: saves what was trained since the last checkpoint, the step in progress included.

    Not where the last checkpoint took longer than there is time for. Engines that share the trainer's GPUs leave them,
    wherever the loop was between its turn and theirs.
    """
    now, patience_s = trainer.statistics(), job.config.run.stop_grace_s / 2
    if not job.config.checkpoint.every or now.failure is not None:
        return
    step = now.step + 1  # where there is one to wait for
    problem = f"{now.thread.running or 'the step in progress'} did not end within {patience_s:g} s"
    try:
        components.rollout_executor.settle(await trainer.settle(), name)
        now = trainer.statistics()
        step, problem = now.step, f"none was written within {patience_s:g} s"
        if await _is_saved(trainer):
            problem = ""
        elif now.checkpoint is not None and now.checkpoint.seconds > patience_s:
            problem = f"the last one took {now.checkpoint.seconds:.1f} s, and there are {patience_s:g} s for it"
        else:
            await trainers_turn(job, components, trainer)
            extra = await components.rollout_executor.save()
            if await trainer.save_checkpoint(now.step - 1, extra, wait=True) is not None:
                problem = ""
    except AsyncRLError as error:  # the step in progress failed, generation failed, another trainer has a batch, ...
        problem = str(error)
    finally:
        if problem:
            told = f"stopped without a checkpoint of step {step}: {problem}"
            if trainer.statistics().saving == step:  # the end of the trainer still leaves it a few seconds
                told = f"stopped while the checkpoint of step {step} was still being written after {patience_s:g} s"
            job.record.note(told)
            job.events.emit(FaultSeen(component="checkpoint", what=told))


async def warm_up(job: Job, trainer: TrainGroup) -> None:
    """Trains `warmup.steps` steps on the warm-up's examples, then forgets the optimizer's state.

    Nothing without steps, or where the trainer goes on from a checkpoint.

    Raises DataError as the data source does.
    """
    config = job.config.warmup
    if config.steps == 0 or trainer.resumed is not None or job.config.debug.rollout_only:
        return
    rising, stride = max(1, config.steps // 10), max(1, config.steps // _PROGRESS_TIMES)
    with job.record.phase("warm-up"):
        examples = await anyio.to_thread.run_sync(_load, job)
        for first in range(0, config.steps, stride):
            with job.record.phase(f"warm-up {first}/{config.steps}"):
                for step in range(first, min(first + stride, config.steps)):
                    lr = config.lr * min(1.0, (step + 1) / rising)
                    metrics = await trainer.train_sft(None, examples.next_batch(step), lr)
        await trainer.reset_optimizer()
    job.record.note(f"warm-up: {config.steps} supervised steps, loss {metrics['train/loss']:.3f}")


async def trainers_turn(job: Job, components: RolloutComponents, trainer: TrainGroup) -> None:
    """Where engines share the trainer's GPUs: they leave them, and the trainer comes back to train. `publish` ends it.

    Raises EngineError for engines that do not give up their memory.
    """
    if job.layout.colocated:
        components.rollout_executor.engines_paused()
        await components.inference_controller.offload()
        await trainer.onload()


async def make_room(job: Job, controller: InferenceController) -> None:
    """Where engines share the trainer's GPUs: they give memory up before the trainer is built there.

    Raises EngineError when an engine does not start.
    """
    if not job.layout.colocated:
        return
    await controller.wait_ready()
    if job.config.engine.colocate_memory_peak_device == "gpu":
        await controller.offload_kv()
    else:
        await controller.offload()


def require_own_engines(job: Job) -> None:
    """Raises ConfigError where engines share the trainer's GPUs."""
    if job.layout.colocated:
        raise ConfigError(
            "engine.gpus: engines that share the trainer's GPUs cannot generate while it trains; give them GPUs of "
            "their own, or run entrypoints/train.py"
        )


async def publish(
    job: Job, components: RolloutComponents, trainer: TrainGroup, rollout_id: int | None = None
) -> PublicationReport | None:
    """Brings the engines to the trainer's weights after rollout `rollout_id`; None: to those it began with.

    Engines that share the trainer's GPUs and all ended in its turn are started again first, once. Returns None where
    half a job runs (`debug`) and there is nothing to publish, or nobody to publish it to. Raises WeightUpdateError as
    `TrainGroup.update_weights` does.
    """
    if not job.layout.colocated:
        return await trainer.update_weights(rollout_id)
    controller, executor, _ = components
    try:
        publication = await _update_in_turn(components, trainer, rollout_id)
    except EnginesLostError as error:
        job.record.note(f"engines are started again, and the weights published after that: {error}")
        await trainer.offload()
        await controller.onload()
        await controller.wait_updatable()
        await _change_places(job, components, trainer)
        publication = await _update_in_turn(components, trainer, rollout_id)
    if publication is not None:
        executor.set_weight_version(publication.version)  # engines have all of their memory back only now
    return publication


async def _update_in_turn(
    components: RolloutComponents, trainer: TrainGroup, rollout_id: int | None
) -> PublicationReport | None:
    """From the trainer's turn on shared GPUs to that of the engines."""
    controller, executor, _ = components
    await trainer.offload(keep_weights=True)
    await controller.onload_weights()
    publication = await trainer.update_weights(rollout_id)
    executor.engines_paused()  # the update was one, and has ended; engines go on with the last of their memory
    try:
        await trainer.offload()
        await controller.onload_kv()
    finally:
        executor.engines_resumed()
    return publication


async def _change_places(job: Job, components: RolloutComponents, trainer: TrainGroup) -> None:
    """From the engines' turn on shared GPUs to that of the trainer, whoever of them lives."""
    components.rollout_executor.engines_paused()
    await make_room(job, components.inference_controller)
    await trainer.onload()


async def gather(
    job: Job, components: RolloutComponents, trainer: TrainGroup, rollout_id: int, name: str = TRAINER
) -> RolloutBatch:
    """The batch of rollout `rollout_id`, the next to be trained; waits until some engine serves.

    `name` is that of the trainer, where the executor was created for several. Raises EngineError where none will, and
    as `RolloutExecutor.get` does.
    """

    async def get() -> RolloutBatch:
        await components.inference_controller.prepare_rollout(rollout_id)
        return await components.rollout_executor.get(rollout_id, name)

    return await _with_weights(job, components, trainer, rollout_id, get)


async def evaluate(job: Job, components: RolloutComponents, trainer: TrainGroup, step: int) -> None:
    """Evaluates the published policy, `step` steps trained, on the held-out prompts of `eval.data`.

    On the engines of `eval.fleet` where there are some: they are brought to the published weights first.
    """
    controller, executor, _ = components

    async def measure() -> EvalReport:
        try:
            if job.config.eval.fleet is None:
                await controller.prepare_eval()
            else:
                executor.set_eval_fleet(await controller.pin_eval_fleet())
            return await executor.eval(step)
        except AsyncRLError as error:  # a result: the job goes on, so a publication under way is to be finished
            return executor.report_eval_skip(step, str(error))

    with job.record.phase("eval"):
        try:
            report = await _with_weights(job, components, trainer, step, measure)
        except AsyncRLError as error:
            report = executor.report_eval_skip(step, str(error))
    job.record.evaluated(step, report.accuracy, report.as_dict(), report.skipped)


async def export(job: Job, controller: InferenceController, trainer: TrainGroup, step: int) -> None:
    """Writes the policy as a Hugging Face directory into the run directory; without a trainer there is none."""
    if job.config.debug.rollout_only:
        return
    started = anyio.current_time()
    with job.record.phase("export"):
        if job.layout.colocated:
            await controller.offload()
            await trainer.onload()
        await trainer.export_hf(job.run.export)
    seconds = anyio.current_time() - started
    job.events.emit(CheckpointWritten(step=step, path=str(job.run.export), seconds=seconds))
    job.record.exported(job.run.export)


async def _with_weights(
    job: Job, components: RolloutComponents, trainer: TrainGroup, step: int, work: Callable[[], Awaitable[T]]
) -> T:
    """Awaits `work` of the engines while the trainer, `step` steps trained, has nothing to do but to publish again."""
    controller = components.inference_controller
    results: list[T] = []
    errors: list[AsyncRLError] = []

    async def publish_again() -> None:
        while not results:
            with anyio.CancelScope() as watch:
                watches.append(watch)
                await controller.wait_publication_needed()
            if results:
                return
            job.record.note("no engine holds the weights any more, and no copy was kept: they are published again")
            try:
                if job.layout.colocated:
                    await _change_places(job, components, trainer)
                if await publish(job, components, trainer, step - 1) is None:
                    return  # half a job has nothing to publish
            except AsyncRLError as error:
                errors.append(error)
                tasks.cancel_scope.cancel()
                return

    watches: list[anyio.CancelScope] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publish_again, name="publish again")
        try:
            results.append(await work())
            for watch in watches:
                watch.cancel()  # a publication under way is finished
        except AsyncRLError as error:  # raised below, outside the task group, which would wrap it
            errors.append(error)
            tasks.cancel_scope.cancel()
    if errors:
        raise errors[0]
    return results[0]


def _load(job: Job) -> SupervisedStream:
    from asyncrl.data.supervised import load_supervised
    from asyncrl.data.tokenizer import PolicyTokenizer

    tokenizer = PolicyTokenizer.load(job.config.model.path)
    context = job.config.model.context_length or tokenizer.context_length
    return load_supervised(job.config.warmup, job.config.data, tokenizer, context_length=context)
