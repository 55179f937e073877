"""What of a job's memory cannot fit, in words, with the setting that makes it fit. Pure.

A start is refused where what always lies on the GPU is more than it has. A plan (`--dry-run`) is refused where the
estimate of a whole step is. The search for a remedy tries combinations of settings, those that cost least first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.config.architecture import check_tensor_parallel
from asyncrl.config.layout import ProcessLayout
from asyncrl.config.machine import Machine
from asyncrl.config.memory.estimate import Estimator
from asyncrl.config.memory.needs import JobMemory, Need
from asyncrl.config.placement.rules import derive_layout
from asyncrl.config.problems import Problem
from asyncrl.config.root import Config
from asyncrl.errors import ConfigError

KEY = "GPU memory"
"""Under which a need that does not fit is told: no single setting is to blame."""
_TRAINED = "engine-"
"""Begins the ids of the engines of the trained model."""
_GB = 10**9
_TOKENS = "train.max_tokens_per_microbatch"
_PEAK = "engine.colocate_memory_peak_device"
_RANKS = "torchrun --nproc-per-node"


def memory_problems(
    estimator: Estimator, machine: Machine, *, tokens: int, longest: int, planned: bool
) -> Iterator[Problem]:
    """What does not fit. `planned`: nothing is started, so an estimate is enough to refuse.

    `tokens`: the packing budget. `longest`: tokens of the longest sequence that the configuration names.
    """
    if estimator.gpu_bytes is None:
        return
    least = longest if planned else 1
    told = (
        _model_alone(estimator)
        or (_whole_step(estimator, tokens) if planned else None)
        or _long_sequences(estimator, longest)
        or _room_for_kv(estimator, least)
    )
    if told is not None:
        yield Problem(KEY, f"{told}; {remedy(estimator, machine, longest)}")
    if planned:
        yield from _host_problems(estimator.memory(tokens))


def _model_alone(estimator: Estimator) -> str | None:
    """What is certain: it lies on the GPU all the time."""
    trainer = estimator.trainer
    if trainer is None:
        return None
    need = Need("each trainer rank", trainer.static, estimator.gpu_bytes)
    return None if need.fits else f"{_short(need)}, before any activation"


def _whole_step(estimator: Estimator, tokens: int) -> str | None:
    worst = estimator.memory(tokens).worst
    return None if worst is None else f"{_short(worst)}, with micro-batches of {tokens} tokens"


def _long_sequences(estimator: Estimator, longest: int) -> str | None:
    """Where nobody set the packing budget."""
    fitting = estimator.largest_budget()
    if estimator.config.train.max_tokens_per_microbatch is not None or fitting is None or fitting >= longest:
        return None
    return (
        f"one rank can train sequences of about {fitting} tokens, and the longest has {longest} "
        f"({_TOKENS} = {longest} tries it as it is)"
    )


def _room_for_kv(estimator: Estimator, least: int) -> str | None:
    """`least`: tokens that an engine of the trained model must hold."""
    for engine_id, (_, memory) in estimator.engines.items():
        needed = least if engine_id.startswith(_TRAINED) else 1
        if memory.kv_tokens < needed:
            room = max(0, memory.kv_tokens)
            return f"{engine_id} has room for the KV of {room} tokens beside its weights, and needs {needed} or more"
    return None


def _host_problems(memory: JobMemory) -> Iterator[Problem]:
    if not memory.host_fits:
        yield Problem(
            "host memory",
            f"the node of rank 0 has {(memory.host_bytes or 0) / _GB:.1f} GB, and the job takes "
            f"{sum(memory.host.values()) / _GB:.1f} GB ({', '.join(memory.host)}); train.optimizer_on_host = false, "
            'weights.keep_published = "never" and engine.colocate = false take less',
        )


def remedy(estimator: Estimator, machine: Machine, longest: int) -> str:
    """The cheapest change of settings with which everything fits: `train.recompute = full would fit`."""
    for changes in sorted(_combinations(estimator, machine), key=lambda changes: sum(c.cost for c in changes)):
        changed = _changed(estimator, machine, changes)
        if changed is not None and _fits(changed, longest):
            return f"{' and '.join(str(change) for change in changes)} would fit"
    return "no setting makes it fit on this machine: use more GPUs, larger ones, or a smaller model"


@dataclass(frozen=True, slots=True)
class _Change:
    """One setting with another value. Cheap changes cost little time in each step."""

    key: str
    value: Any
    cost: float

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.key} left unset"
        return f"{self.key}{' ' if self.key == _RANKS else ' = '}{str(self.value).lower()}"


def _combinations(estimator: Estimator, machine: Machine) -> Iterator[tuple[_Change, ...]]:
    config = estimator.config
    axes: list[Sequence[_Change]] = [
        [_Change(_TOKENS, None, 1)] if config.train.max_tokens_per_microbatch is not None else [],
        [_Change("train.recompute", mode, cost) for mode, cost in _stronger(config.train.recompute)],
        _doublings("train.tensor_parallel", config.train.tensor_parallel, machine.local_world_size, 2),
        [_Change("train.optimizer_on_host", True, 8)] if not config.train.optimizer_on_host else [],
        _doublings(_RANKS, machine.local_world_size, len(machine.gpus), 5) if machine.nodes == 1 else [],
        [_Change(_PEAK, "cpu", 0.5)] if config.engine.colocate_memory_peak_device == "gpu" else [],
        _doublings("engine.tensor_parallel", config.engine.tensor_parallel, len(machine.gpus), 2.5),
    ]
    for choice in itertools.product(*([None, *axis] for axis in axes)):
        changes = tuple(change for change in choice if change is not None)
        if changes:
            yield changes


def _stronger(mode: str) -> Iterator[tuple[str, float]]:
    modes = {"none": 0.0, "mlp": 1.5, "full": 3.0}
    return ((other, cost) for other, cost in modes.items() if cost > modes[mode])


def _doublings(key: str, value: int, most: int, cost: float) -> list[_Change]:
    found: list[_Change] = []
    for times in itertools.count(1):
        value *= 2
        if value > most:
            return found
        found.append(_Change(key, value, cost * times))
    return found


def _changed(estimator: Estimator, machine: Machine, changes: Sequence[_Change]) -> Estimator | None:
    """The job with these changes; None where it has no layout."""
    updates: dict[str, dict[str, Any]] = {}
    for change in changes:
        section, _, name = change.key.partition(".")
        if change.key == _RANKS:
            machine = replace(machine, world_size=change.value, local_world_size=change.value)
        else:
            updates.setdefault(section, {})[name] = change.value
    config = _with(estimator.config, updates)
    layout = _layout(estimator, config, machine)
    return None if layout is None else replace(estimator, config=config, layout=layout)


def _with(config: Config, updates: Mapping[str, dict[str, Any]]) -> Config:
    return config.model_copy(
        update={section: getattr(config, section).model_copy(update=values) for section, values in updates.items()}
    )


def _layout(estimator: Estimator, config: Config, machine: Machine) -> ProcessLayout | None:
    """The layout, where the model and each batch can be cut so."""
    layout, _ = derive_layout(config, machine)
    if layout is None or config.rollout.prompts_per_step % (config.train.minibatches * layout.data_parallel):
        return None
    model = estimator.model
    try:
        check_tensor_parallel(model, config.train.tensor_parallel)
    except ConfigError:
        return None
    size = config.engine.tensor_parallel
    cut = model.num_heads % size == 0 and (model.num_kv_heads % size == 0 or size % model.num_kv_heads == 0)
    return layout if cut else None


def _fits(estimator: Estimator, longest: int) -> bool:
    memory = estimator.memory(estimator.budget(longest))
    return (
        memory.worst is None
        and memory.host_fits
        and all(tokens >= longest for engine_id, tokens in memory.kv_tokens.items() if engine_id.startswith(_TRAINED))
    )


def _short(need: Need) -> str:
    """`rank 0..3 need 91.9 GB of 76.0 GB (weights 16.4, ...)`."""
    parts = ", ".join(f"{name} {size / _GB:.1f}" for name, size in need.parts.items())
    verb = "needs" if ".." not in need.who else "need"
    return f"{need.who} {verb} {need.total / _GB:.1f} GB ({parts}) of {(need.capacity or 0) / _GB:.1f} GB"
