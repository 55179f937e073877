"""Trains a policy while the engines generate ahead: neither half waits for the other without need.

    python entrypoints/train_async.py @ entrypoints/recipes/demo.toml --rollout.max_staleness 1

How far ahead is what `rollout.max_staleness` allows: 0 is the loop of train.py, 1 has the engines work on the next
batch while the trainer works on this one, more lets slow responses take longer than a step. The bound is never
exceeded. New weights are published every `train.update_weights_interval` batches, to engines in the midst of work.
"""

from __future__ import annotations

import sys

from asyncrl.components import Job, run_job, start_run


async def train(job: Job) -> None:
    run = await start_run(job, generates_ahead=True)
    for step in run.steps():
        if run.evaluation_due(step):
            await run.evaluate(step)
        batch = await run.next_batch(step)  # from the first one on, engines generate by themselves
        metrics = await run.train(step, batch)
        await run.commit(step)
        await run.checkpoint(step)
        if run.publication_due(step):
            await run.publish(step)
        run.record_step(step, metrics)
    await run.finish()  # last checkpoint, last publication, evaluation at the end, export


if __name__ == "__main__":
    sys.exit(run_job(train))
