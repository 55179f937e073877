"""The arithmetic of staleness: which bounds a schedule can keep. Pure.

With m optimizer steps for each batch (train.minibatches * train.batch_epochs), the last of batch j is taken by weights
that have had (j + 1)·m - 1 of them. Those of step v, v batches trained, have had v·m. With a publication every u
batches, v lags up to u - 1 behind j, hence the least bound that can be kept: u·m - 1.
"""

from __future__ import annotations

from asyncrl.config.root import Config


def least_staleness(config: Config) -> int:
    """Optimizer steps: the staleness of a loop that generates nothing ahead."""
    return config.train.update_weights_interval * config.train.optimizer_steps_per_batch - 1


def max_staleness(config: Config) -> int:
    """Optimizer steps: the bound that is in force."""
    asked = config.rollout.max_staleness
    return least_staleness(config) if asked is None else asked
