"""Engines beside those of the trained model: which names and settings cannot work, and which GPUs they get. Pure.

Invariants
- They share no GPU with a trainer rank, with an engine of the trained model, or with each other.
- Where none are named they get the last ones, and the engines of the trained model what is left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from asyncrl.config.checks.engine_args import server_arg_problems
from asyncrl.config.machine import Machine
from asyncrl.config.problems import Problem
from asyncrl.config.root import Config
from asyncrl.config.sections.inference import ServingConfig

EVAL = "eval"
"""Name of the engines that only evaluate."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TAKEN = frozenset({"actor", "engine", "external", EVAL, "host", "reward", "router"})
"""Names of other processes of a job, or of the trained model."""


def served_beside(config: Config) -> dict[str, tuple[str, ServingConfig]]:
    """Name → section and settings of every group of engines beside those of the trained model."""
    groups: dict[str, tuple[str, ServingConfig]] = {
        name: (f"models.{name}", settings) for name, settings in config.models.items()
    }
    if config.eval.fleet is not None:
        groups[EVAL] = ("eval.fleet", config.eval.fleet)
    return groups


def served_problems(config: Config) -> Iterator[Problem]:
    """What is wrong with names, paths and server arguments."""
    for name, model in config.models.items():
        if not _NAME.fullmatch(name):
            yield Problem(f"models.{name}", "is no name for a model; use lower-case letters, digits and underscores")
        elif name in _TAKEN:
            yield Problem(f"models.{name}", f"{name} is taken by a part of every job; choose another name")
        path = model.path
        if path is not None and not (path / "config.json").is_file():
            yield Problem(
                f"models.{name}.path",
                f"{path} is no Hugging Face model directory: it holds no config.json (looked in {Path.cwd()})",
            )
    for section, settings in served_beside(config).values():
        yield from server_arg_problems(settings.server_args, section)
    if config.eval.fleet is not None and config.eval.data is None:
        yield Problem("eval.fleet", "has nothing to evaluate; set eval.data")


def gpus_beside(
    config: Config, machine: Machine, trainers: Sequence[int], problems: list[Problem]
) -> Mapping[str, tuple[tuple[int, ...], ...]]:
    """Name → GPUs of each engine (none on CPU); what cannot be is added to `problems`."""
    taken = dict.fromkeys(trainers, "trainer ranks") | dict.fromkeys(config.engine.gpus or (), "engine.gpus")
    groups = served_beside(config)
    named = {name: group for name, group in groups.items() if group[1].gpus is not None}
    chosen: dict[str, tuple[int, ...]] = {}
    for name, (section, settings) in named.items():
        gpus = settings.gpus or ()
        problem = _named_problem(gpus, settings, machine, taken)
        if problem is not None:
            problems.append(Problem(f"{section}.gpus", problem))
            continue
        taken |= dict.fromkeys(gpus, f"{section}.gpus")
        chosen[name] = gpus
    free = [gpu for gpu in range(len(machine.gpus)) if gpu not in taken]
    for name, (section, settings) in groups.items():
        need = settings.num_engines * settings.tensor_parallel
        if not machine.gpus or name in named:
            continue
        if need > len(free):
            problems.append(
                Problem(
                    f"{section}.num_engines",
                    f"{settings.num_engines} engine(s) of {settings.tensor_parallel} GPU(s) need {need} of their own, "
                    f"but of the {len(machine.gpus)} visible GPUs {len(free)} are left; use fewer, or leave it out",
                )
            )
            continue
        chosen[name], free = tuple(free[-need:]), free[:-need]
    return {name: _shares(chosen.get(name, ()), settings) for name, (_, settings) in groups.items()}


def _named_problem(
    gpus: tuple[int, ...], settings: ServingConfig, machine: Machine, taken: Mapping[int, str]
) -> str | None:
    if not machine.gpus:
        return f"{list(gpus)}, but this job sees no GPU; leave it out to run on CPU"
    absent = sorted({gpu for gpu in gpus if gpu not in range(len(machine.gpus))})
    if absent:
        return f"{absent} named, but the visible GPUs are 0 to {len(machine.gpus) - 1}"
    shared = {gpu: taken[gpu] for gpu in gpus if gpu in taken}
    if shared:
        return "; ".join(f"GPU {gpu} is used by {who}" for gpu, who in shared.items()) + "; name others"
    need = settings.num_engines * settings.tensor_parallel
    if len(set(gpus)) != need or len(gpus) != need:
        return (
            f"{list(gpus)}, but {settings.num_engines} engine(s) of {settings.tensor_parallel} GPU(s) use {need} "
            "different ones; list exactly those"
        )
    return None


def _shares(gpus: tuple[int, ...], settings: ServingConfig) -> tuple[tuple[int, ...], ...]:
    size = settings.tensor_parallel
    return tuple(gpus[i * size : (i + 1) * size] for i in range(settings.num_engines))
