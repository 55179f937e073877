"""A loop of your own: best-of-n imitation instead of GRPO.

    python entrypoints/own_loop.py @ entrypoints/recipes/demo.toml --train.num-steps 20

Each step samples a batch, keeps the best answer of each prompt, and trains on those with cross entropy. All the rest is
as in train.py: with `--checkpoint.every 5 --run.if-exists resume` it goes on where it was, also after a kill; with
`eval.data` it evaluates; at its end it exports the policy.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from asyncrl.components import Job, run_job, start_run

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
    run = await start_run(job)
    for step in run.steps():
        if run.evaluation_due(step):
            await run.evaluate(step)
        batch = await run.next_batch(step)
        async with run.trainers_turn() as trainer:
            metrics = await trainer.train_sft(step, only_the_best(batch), job.config.train.lr)
        await run.commit(step)
        await run.checkpoint(step)
        await run.publish(step)
        run.record_step(step, metrics)
    await run.finish()


if __name__ == "__main__":
    sys.exit(run_job(imitate_the_best))
