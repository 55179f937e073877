"""Which settings of training and data differ from those of the checkpoint that a job goes on from. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from asyncrl.config import Config
from asyncrl.config.reading.redaction import shown
from asyncrl.config.reading.toml import config_toml

_SAME_TRAINING = frozenset(
    f"train.{name}"
    for name in (
        *("max_tokens_per_microbatch", "tensor_parallel", "recompute", "optimizer_on_host"),
        *("init_timeout_s", "step_timeout_s"),
    )
)
"""Settings that change how a step is computed, not its result. `CheckpointSaver` tells another layout."""

_TOLD = (
    *("train.", "algorithm.", "data.", "eval.data.", "model.path", "model.dtype"),
    *("rollout.prompts_per_step", "rollout.max_staleness"),
)
"""What decides what is trained, on what, and how it is measured. The executor checks what shapes a group."""


def changed_settings(saved: str, config: Config) -> tuple[str, ...]:
    """Lists the differences to `saved`, the configuration in a checkpoint: `train.lr was 0.001, is 0.0001`, ...

    A setting that `saved` lacks, since another version wrote it, counts as unchanged.
    """
    before, now = (_flat(tomllib.loads(text)) for text in (saved, config_toml(config)))
    names = [name for name in now if name.startswith(_TOLD) and name not in _SAME_TRAINING]
    return tuple(
        f"{name} was {_in_words(name, before[name])}, is {_in_words(name, now[name])}"
        for name in names
        if name in before and before[name] != now[name]
    )


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """All values by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _in_words(name: str, value: Any) -> str:
    return "none" if value == "none" else shown(name.rpartition(".")[2], value)
