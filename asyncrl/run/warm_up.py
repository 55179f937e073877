"""The warm-up: supervised training of the policy before the first rollout."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from asyncrl.data.sources import Progress
from asyncrl.rollout.reading import read_in_thread
from asyncrl.run.job import Job

if TYPE_CHECKING:
    from asyncrl.data.supervised import SupervisedStream
    from asyncrl.run.parts import TrainingPart

_PROGRESS_TIMES = 20
"""How often the display hears of the progress."""


async def warm_up(job: Job, trainer: TrainingPart) -> None:
    """Trains `warmup.steps` steps on the warm-up's examples, then forgets the optimizer's state.

    Does nothing without steps, where the trainer goes on from a checkpoint, and where there is no trainer. Raises
    DataError as the data source does.
    """
    config = job.config.warmup
    if config.steps == 0 or trainer.resumed is not None or job.config.debug.rollout_only:
        return
    rising, stride = max(1, config.steps // 10), max(1, config.steps // _PROGRESS_TIMES)
    with job.record.phase("warm-up"):
        examples = await read_in_thread(partial(_load, job), "warmup", config.source)
        for first in range(0, config.steps, stride):
            with job.record.phase(f"warm-up {first}/{config.steps}"):
                for step in range(first, min(first + stride, config.steps)):
                    lr = config.lr * min(1.0, (step + 1) / rising)
                    metrics = await trainer.train_sft(None, examples.next_batch(step), lr)
        await trainer.reset_optimizer()
    job.record.note(f"warm-up: {config.steps} supervised steps, loss {metrics['train/loss']:.3f}")


def _load(job: Job, progress: Progress) -> SupervisedStream:
    from asyncrl.data.supervised import load_supervised
    from asyncrl.data.tokenizer import PolicyTokenizer

    tokenizer = PolicyTokenizer.load(job.config.model.path)
    context = job.config.model.context_length or tokenizer.context_length
    return load_supervised(job.config.warmup, job.config.data, tokenizer, context_length=context, progress=progress)
