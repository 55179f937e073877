"""A loop of your own: best-of-n imitation instead of GRPO, in sixty lines over `asyncrl.components`.

    python entrypoints/own_loop.py @ entrypoints/recipes/demo.toml --train.num-steps 20

Each step samples a batch, keeps the best answer of each prompt, and trains on those with cross entropy. With
`--checkpoint.every 5 --run.if-exists resume` it goes on where it was, also after a kill: that is `resume`,
`checkpoint` and `last_checkpoint`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from asyncrl.components import (
    Job,
    checkpoint,
    create_rollout_components,
    create_train_group,
    gather,
    last_checkpoint,
    publish,
    resume,
    run_job,
    trainers_turn,
    warm_up,
)

if TYPE_CHECKING:  # torch comes with the components, once the engines are on their way
    from asyncrl.data.batch import RolloutBatch


def only_the_best(batch: RolloutBatch) -> RolloutBatch:
    """The same batch with a loss on the first best-rewarded sample of each group alone."""
    best = batch.truncated.new_zeros(batch.num_samples)
    for group in range(len(batch.group_ids)):
        members = (batch.group_index == group).nonzero().flatten()
        best[members[batch.rewards[members].argmax()]] = True
    return replace(batch, loss_mask=batch.sampled & best[batch.token_samples])


async def imitate_the_best(job: Job) -> None:
    with job.record.phase("startup"):
        components = await create_rollout_components(job)
        controller, executor, num_rollout_per_epoch = components
        trainer = await create_train_group(job, components)
        first = await trainer.init()
        await resume(job, components, trainer, first)
        await warm_up(job, trainer)
        await controller.wait_ready()
        await publish(job, components, trainer)
    steps = job.config.train.num_steps
    if steps is None:
        steps = job.config.train.num_epochs * (num_rollout_per_epoch or 0)
    job.record.start(steps, first)
    for step in range(first, steps):
        if job.stop.requested:
            break
        with job.record.phase("generate"):
            batch = await gather(job, components, trainer, step)
        with job.record.phase("train"):
            await trainers_turn(job, components, trainer)  # where they share GPUs
            metrics = await trainer.train_sft(step, only_the_best(batch), job.config.train.lr)
            await executor.commit(step)
        last = job.stop.requested or step + 1 == steps
        await checkpoint(job, components, trainer, step, last=last)
        with job.record.phase("publish"):
            publication = await publish(job, components, trainer, step)
        job.record.step(step + 1, executor.last_rollout, metrics, publication)
    await last_checkpoint(job, components, trainer)  # for a stop that came after the one above


if __name__ == "__main__":
    sys.exit(run_job(imitate_the_best))
