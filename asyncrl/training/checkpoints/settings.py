"""Which settings of training differ from those of the checkpoint that a job goes on from. Pure."""

from __future__ import annotations

import tomllib
from typing import Any

from asyncrl.config import Config
from asyncrl.config.reading.redaction import shown
from asyncrl.config.reading.toml import config_toml

_SAME_TRAINING = frozenset({"max_tokens_per_microbatch", "tensor_parallel", "init_timeout_s", "step_timeout_s"})
"""Settings of `train` that change how a step is computed, not its result. Another number of ranks is refused anyway."""

_BATCHES = ("prompts_per_step", "max_staleness")
"""Settings of `rollout` that decide which groups a step trains on. The executor checks those that shape a group."""


def changed_settings(saved: str, config: Config) -> tuple[str, ...]:
    """Lists the differences to `saved`, the configuration in a checkpoint: `train.lr was 0.001, is 0.0001`, ...

    A setting that `saved` lacks, since another version wrote it, counts as unchanged.
    """
    before, now = tomllib.loads(saved), tomllib.loads(config_toml(config))
    names = [("train", name) for name in now["train"] if name not in _SAME_TRAINING]
    names += [("rollout", name) for name in _BATCHES]
    return tuple(
        f"{section}.{name} was {_in_words(name, was)}, is {_in_words(name, now[section][name])}"
        for section, name in names
        if (was := before.get(section, {}).get(name)) is not None and was != now[section][name]
    )


def _in_words(name: str, value: Any) -> str:
    return "none" if value == "none" else shown(name, value)
