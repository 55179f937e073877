"""Trains a policy with GRPO while the engines generate ahead: no one waits for the other without need.

    torchrun --nproc-per-node 1 entrypoints/train_async.py @ entrypoints/recipes/demo.toml --rollout.max_staleness 1

How far ahead is what `rollout.max_staleness` allows: 0 is the loop of train.py, 1 has the engines work on the next
batch while the trainer works on this one, more lets slow responses take longer than a step. The bound is never
exceeded. New weights are published every `train.update_weights_interval` batches, to engines in the midst of work.
"""

from __future__ import annotations

import sys

from asyncrl.components import (
    Job,
    checkpoint,
    create_rollout_components,
    create_train_group,
    evaluate,
    export,
    gather,
    last_checkpoint,
    publish,
    require_own_engines,
    resume,
    run_job,
    warm_up,
)


async def train(job: Job) -> None:
    config, record = job.config, job.record
    require_own_engines(job)  # on the trainer's GPUs they could not generate while it trains

    # Engines and router boot in the background while the trainer builds its model and warms it up.
    with record.phase("startup"):
        components = await create_rollout_components(job)
        controller, executor, num_rollout_per_epoch = components
        trainer = await create_train_group(job, components)
        first = await trainer.init()
        await resume(job, components, trainer, first)
        await warm_up(job, trainer)
        await controller.wait_ready()
        await publish(job, components, trainer)  # no engine serves before it holds the trainer's own weights

    if config.train.num_steps is not None:
        num_steps = config.train.num_steps
    else:
        num_steps = config.train.num_epochs * (num_rollout_per_epoch or 0)
    record.start(num_steps, first)

    for rollout_id in range(first, num_steps):
        if job.stop.requested:
            break
        if config.eval.due(rollout_id, first):
            await evaluate(job, components, trainer, rollout_id)
        if rollout_id == first:
            executor.generate_ahead(first, num_steps)

        with record.phase("wait"):
            batch = await gather(job, components, trainer, rollout_id)

        with record.phase("train"):
            metrics = await trainer.train(rollout_id, batch)
            await executor.commit(rollout_id)
        last = job.stop.requested or rollout_id + 1 == num_steps
        await checkpoint(job, components, trainer, rollout_id, last=last)

        publication = None
        if config.train.publishes(rollout_id):
            with record.phase("publish"):
                publication = await publish(job, components, trainer, rollout_id)

        record.step(rollout_id + 1, executor.last_rollout, metrics, publication)

    await last_checkpoint(job, components, trainer)  # for a stop that came after the one above
    if not config.train.publishes(record.steps - 1):  # it ended between two publications
        with record.phase("publish"):
            await publish(job, components, trainer, record.steps - 1)
    if config.eval.data is not None and config.eval.at_end:
        await evaluate(job, components, trainer, record.steps)
    if config.run.export:
        await export(job, controller, trainer, record.steps)


if __name__ == "__main__":
    sys.exit(run_job(train))
