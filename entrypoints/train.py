"""Trains a policy, one step after the other: generate, train, publish.

    python entrypoints/train.py @ entrypoints/recipes/demo.toml --train.lr 1e-3

This is the whole loop. Copy this file to write your own (`asyncrl new DIR` does); `asyncrl.components` has all that it
needs. Several ranks: `torchrun --nproc-per-node 4`, with `-m asyncrl.train` for the file where it is installed.
"""

from __future__ import annotations

import sys

from asyncrl.components import Job, run_job, start_run


async def train(job: Job) -> None:
    run = await start_run(job)  # engines and trainer are up, restored, warmed up, and hold the same weights
    for step in run.steps():  # ends early where the job was asked to stop
        if run.evaluation_due(step):
            await run.evaluate(step)
        batch = await run.next_batch(step)  # generate
        metrics = await run.train(step, batch)  # train
        await run.commit(step)
        await run.checkpoint(step)
        await run.publish(step)
        run.record_step(step, metrics)
    await run.finish()  # last checkpoint, evaluation at the end, export


if __name__ == "__main__":
    sys.exit(run_job(train))
