"""What is extreme in a batch whose loss or gradient is not finite: where to look for the cause. Pure.

A reward that is far from all others, an advantage made of it, a log-prob of a token that nearly cannot be drawn, or a
ratio that overflows is the cause as a rule. Where nothing of that kind is in the batch, weights and learning rate are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncrl.data.batch import RolloutBatch

_LIMITS = {"reward": 1e4, "log-prob of the engine": 30.0, "column": 1e4}
"""Absolute values over which a number is called extreme. A log-prob of -30 is one token in 10^13."""
_LARGE_RATIO = 1e4
"""A ratio or another maximum of the loss over which it is called extreme: probabilities differ by so many times."""


def describe_extremes(batch: RolloutBatch, sequences: Sequence[int], maxima: Mapping[str, float]) -> str:
    """One sentence about the trained tokens of `sequences`; `maxima` are those of the loss, by name.

    It begins with `extreme in it:`, or with `nothing in it is extreme`.
    """
    chosen = torch.zeros(batch.num_sequences, dtype=torch.bool)
    chosen[list(sequences)] = True
    tokens = batch.loss_mask & chosen.repeat_interleave(batch.sequence_lengths)
    samples = torch.unique(batch.sample_index[chosen])
    of_tokens = batch.token_samples[tokens]
    figures = [("reward", "reward", batch.rewards[samples], samples)]
    figures.append(("log-prob of the engine", "log-prob of the engine", batch.logprobs[tokens], of_tokens))
    figures += [("column", name, column[tokens], of_tokens) for name, column in batch.columns.items()]
    extreme, usual = list[str](), list[str]()
    for kind, name, values, owners in figures:
        if not len(values):
            continue
        worst = _worst(values)
        value = float(values[worst])
        if abs(value) <= _LIMITS[kind]:
            usual.append(f"{name} {float(values.min()):.4g} to {float(values.max()):.4g}")
        else:
            extreme.append(f"{name} {value:.4g} in sample {batch.sample_ids[int(owners[worst])]}")
    extreme += [f"{name} {value:.4g}" for name, value in maxima.items() if not value <= _LARGE_RATIO]
    if extreme:
        return f"extreme in it: {', '.join(extreme)}"
    return f"nothing in it is extreme ({', '.join(usual)}), so look at the weights and at train.lr"


def _worst(values: Tensor) -> int:
    """The index of a value that is not finite, else of the largest absolute one."""
    return int(values.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).argmax())
