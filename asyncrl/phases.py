"""What every loop does around its steps: warm-up, evaluation, export.

Each accounts for its own time, and an evaluation that fails is a skipped point with a reason, never the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from asyncrl.job import Job
from asyncrl.observability.events import CheckpointWritten

if TYPE_CHECKING:  # torch stays out of the driver until the engines are on their way
    from asyncrl.data.supervised import SupervisedStream
    from asyncrl.inference.controller import InferenceController
    from asyncrl.rollout.executor import RolloutExecutor
    from asyncrl.training.train_group import TrainGroup


_PROGRESS_STEPS = 20
"""The display hears of the warm-up's progress every so many steps."""


async def warm_up(job: Job, trainer: TrainGroup) -> None:
    """Trains `warmup.steps` steps on the warm-up's examples, then forgets the optimizer's state. Nothing without steps.

    Raises DataError as the data source does.
    """
    config = job.config.warmup
    if config.steps == 0:
        return
    rising = max(1, config.steps // 10)
    with job.record.phase("warm-up"):
        examples = await anyio.to_thread.run_sync(_load, job)
        for first in range(0, config.steps, _PROGRESS_STEPS):
            with job.record.phase(f"warm-up {first}/{config.steps}"):
                for step in range(first, min(first + _PROGRESS_STEPS, config.steps)):
                    lr = config.lr * min(1.0, (step + 1) / rising)
                    metrics = await trainer.train_sft(examples.next_batch(step), lr)
        await trainer.reset_optimizer()
    job.record.note(f"warm-up: {config.steps} supervised steps, loss {metrics['train/loss']:.3f}")


async def evaluate(job: Job, controller: InferenceController, executor: RolloutExecutor, step: int) -> None:
    """Evaluates the published policy, `step` steps trained, on the held-out prompts of `eval.data`."""
    with job.record.phase("eval"):
        await controller.prepare_eval()
        report = await executor.eval(step)
    job.record.evaluated(step, report.accuracy, report.as_dict(), report.skipped)


async def export(job: Job, trainer: TrainGroup, step: int) -> None:
    """Writes the policy as a Hugging Face directory into the run directory."""
    started = anyio.current_time()
    with job.record.phase("export"):
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
