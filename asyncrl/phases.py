"""What every loop does around its steps: warm-up, publication, evaluation, checkpoints, export.

Invariants
- An evaluation that fails is a skipped point with a reason, never the end.
- Where engines share the trainer's GPUs, weights are exported while the trainer's are on the device, and only then
  leave it; the rest of the trainer leaves before the engines' weights come back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.job import Job
from asyncrl.observability.events import CheckpointWritten, read_events
from asyncrl.rollout.events import GroupsRolledBack
from asyncrl.rollout.ledger import rolled_back

if TYPE_CHECKING:  # torch stays out of the driver until the engines are on their way
    from asyncrl.components import RolloutComponents
    from asyncrl.data.supervised import SupervisedStream
    from asyncrl.inference.controller import InferenceController
    from asyncrl.rollout.executor import RolloutExecutor
    from asyncrl.training.train_group import TrainGroup
    from asyncrl.weights.publication import PublicationReport


_PROGRESS_TIMES = 20
"""The display hears so many times of the warm-up's progress."""


async def resume(job: Job, components: RolloutComponents, trainer: TrainGroup, first: int) -> None:
    """Where the trainer goes on from a checkpoint, as of `first` steps, so does the executor; after `trainer.init`.

    What earlier attempts trained after that is marked as rolled back in the event log. Raises CheckpointError for a
    checkpoint without the executor's part, DataError for other data than it was written with.
    """
    if trainer.resumed is not None:
        await components.rollout_executor.restore(trainer.resumed.extra, first)
        job.record.note(f"resumed from {trainer.resumed.path}")
    if job.run.attempt > 0:
        group_ids = await anyio.to_thread.run_sync(lambda: rolled_back(read_events(job.run.events), first))
        if group_ids:
            job.events.emit(GroupsRolledBack(step=first, group_ids=group_ids))


async def checkpoint(
    job: Job, components: RolloutComponents, trainer: TrainGroup, rollout_id: int, *, last: bool
) -> None:
    """Saves trainer and executor after rollout `rollout_id` where `checkpoint.every` says so, and as the `last`.

    Call it after the commit, and before a publication takes a colocated trainer off its GPUs. It is written beside
    the training; only the last one is waited for.
    """
    settings = job.config.checkpoint
    if settings.every and (last or settings.due(rollout_id + 1)):
        with job.record.phase("checkpoint"):
            await trainer.save_checkpoint(rollout_id, await components.rollout_executor.save(), wait=last)


async def warm_up(job: Job, trainer: TrainGroup) -> None:
    """Trains `warmup.steps` steps on the warm-up's examples, then forgets the optimizer's state.

    Nothing without steps, or where the trainer goes on from a checkpoint.

    Raises DataError as the data source does.
    """
    config = job.config.warmup
    if config.steps == 0 or trainer.resumed is not None:
        return
    rising, stride = max(1, config.steps // 10), max(1, config.steps // _PROGRESS_TIMES)
    with job.record.phase("warm-up"):
        examples = await anyio.to_thread.run_sync(_load, job)
        for first in range(0, config.steps, stride):
            with job.record.phase(f"warm-up {first}/{config.steps}"):
                for step in range(first, min(first + stride, config.steps)):
                    lr = config.lr * min(1.0, (step + 1) / rising)
                    metrics = await trainer.train_sft(examples.next_batch(step), lr)
        await trainer.reset_optimizer()
    job.record.note(f"warm-up: {config.steps} supervised steps, loss {metrics['train/loss']:.3f}")


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
) -> PublicationReport:
    """Brings the engines to the trainer's weights after rollout `rollout_id`; None: to those it began with.

    Raises WeightUpdateError as `TrainGroup.update_weights` does.
    """
    controller, executor, _ = components
    if job.layout.colocated:
        await trainer.offload(keep_weights=True)
        await controller.onload_weights()
    async with executor.updating():
        publication = await trainer.update_weights(rollout_id)
        if job.layout.colocated:
            await trainer.offload()
            await controller.onload_kv()
        executor.set_weight_version(
            publication.version
        )  # before anything is sent: requests go by what they begin under
    return publication


async def evaluate(job: Job, controller: InferenceController, executor: RolloutExecutor, step: int) -> None:
    """Evaluates the published policy, `step` steps trained, on the held-out prompts of `eval.data`.

    On the engines of `eval.fleet` where there are some: they are brought to the published weights first.
    """
    with job.record.phase("eval"):
        try:
            if job.config.eval.fleet is None:
                await controller.prepare_eval()
            else:
                executor.set_eval_fleet(await controller.pin_eval_fleet())
        except AsyncRLError as error:
            report = executor.report_eval_skip(step, str(error))
        else:
            report = await executor.eval(step)
    job.record.evaluated(step, report.accuracy, report.as_dict(), report.skipped)


async def export(job: Job, controller: InferenceController, trainer: TrainGroup, step: int) -> None:
    """Writes the policy as a Hugging Face directory into the run directory."""
    started = anyio.current_time()
    with job.record.phase("export"):
        if job.layout.colocated:
            await controller.offload()
            await trainer.onload()
        await trainer.export_hf(job.run.export)
    seconds = anyio.current_time() - started
    job.events.emit(CheckpointWritten(step=step, path=str(job.run.export), seconds=seconds))
    job.record.exported(job.run.export)


def _load(job: Job) -> SupervisedStream:
    from asyncrl.data.supervised import load_supervised
    from asyncrl.data.tokenizer import PolicyTokenizer

    tokenizer = PolicyTokenizer.load(job.config.model.path)
    context = job.config.model.context_length or tokenizer.context_length
    return load_supervised(job.config.warmup, job.config.data, tokenizer, context_length=context)
