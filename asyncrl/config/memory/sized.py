"""Sizes a job: its packing budget where that is unset, its memory, and what of it cannot fit.

Only here are models read for the estimate. A model that cannot be read, or is not there yet, leaves the job unsized.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.architecture import Architecture, read_architecture
from asyncrl.config.checks.served import served_beside
from asyncrl.config.layout import ProcessLayout
from asyncrl.config.machine import Machine
from asyncrl.config.memory.estimate import Estimator
from asyncrl.config.memory.needs import JobMemory
from asyncrl.config.memory.refusals import memory_problems
from asyncrl.config.problems import Problem
from asyncrl.config.root import Config
from asyncrl.errors import ModelError

BUDGET = "train.max_tokens_per_microbatch"
FITTED = "what fits the GPU"
"""Origin of a packing budget that was found here."""


@dataclass(frozen=True, slots=True)
class SizedJob:
    """A job and its memory."""

    config: Config
    """With a packing budget on GPUs."""
    sources: dict[str, str]
    """Origins of what was found, by key."""
    memory: JobMemory
    problems: tuple[Problem, ...]


def sized_job(config: Config, layout: ProcessLayout, machine: Machine, *, dry_run: bool) -> SizedJob | None:
    """Sizes a job; None where the shape of its model is not known.

    Every rank must come to the same budget. Rank 0 may be about to build the model (`model.builder`), so that others
    find it or not: then the budget follows from nothing but the configuration.
    """
    model = _architecture(config.model.path)
    if model is None:
        return None
    shapes = {name: model if path is None else _architecture(path) for name, path in _paths(config).items()}
    beside = {name: shape for name, shape in shapes.items() if shape is not None}
    sources: dict[str, str] = {}
    longest = config.model.context_length or config.rollout.max_new_tokens + 1
    frozen = tuple(shape for path in _frozen(config) if (shape := _architecture(path)) is not None)
    gpu_bytes = machine.gpu_bytes if layout.device == "cuda" else None
    estimator = Estimator(config, layout, model, gpu_bytes, machine.host_bytes, frozen, beside)
    tokens = config.train.packing_budget if config.model.builder is not None else estimator.budget(longest)
    problems = memory_problems(estimator, machine, tokens=tokens, longest=longest, planned=dry_run)
    if config.train.max_tokens_per_microbatch is None and layout.device == "cuda" and config.model.builder is None:
        train = config.train.model_copy(update={"max_tokens_per_microbatch": tokens})
        config, sources = config.model_copy(update={"train": train}), {BUDGET: FITTED}
    return SizedJob(config, sources, estimator.memory(tokens), tuple(problems))


def _frozen(config: Config) -> Iterator[Path]:
    """The directory of each model that the trainer's ranks hold and do not train."""
    algorithm = config.algorithm
    if algorithm.reference is not None or algorithm.kl not in (None, "off"):
        yield algorithm.reference or config.model.path
    if algorithm.teacher is not None:
        yield algorithm.teacher


def _paths(config: Config) -> dict[str, Path | None]:
    """The directory of each model beside the trained one; None where it is that of the trained one."""
    return {name: config.models[name].path if name in config.models else None for name in served_beside(config)}


def _architecture(path: Path) -> Architecture | None:
    try:
        return read_architecture(path)
    except ModelError:
        return None
