"""The arithmetic of staleness: which bounds a schedule can keep. Pure.

Each batch takes m optimizer steps (train.minibatches * train.batch_epochs). Before the last step of batch j, the
weights have had (j + 1)·m - 1 steps. Weights that were published after v batches have had v·m steps. With a publication
every u batches, v is at least j - (u - 1). So the least bound that can be kept is u·m - 1.

Example: m = 2, u = 3. Weights are published after batches 0, 3, 6. Batch 5 trains on samples of the weights after batch
3, which have had 6 steps. Before its last step the weights have had 11 steps: a staleness of 5 = 3·2 - 1.
"""

from __future__ import annotations

from asyncrl.config.root import Config


def least_staleness(config: Config) -> int:
    """The staleness of a loop that generates nothing ahead, in optimizer steps."""
    return config.train.update_weights_interval * config.train.optimizer_steps_per_batch - 1


def max_staleness(config: Config) -> int:
    """The bound that is in force, in optimizer steps."""
    asked = config.rollout.max_staleness
    return least_staleness(config) if asked is None else asked
