"""Models that are served beside the trained one: which names and settings cannot work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.checks.engine_args import server_arg_problems
from asyncrl.config.problems import Problem
from asyncrl.config.root import Config
from asyncrl.config.sections.inference import ServingConfig

EVAL = "eval"
"""The name of the engines that only evaluate."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TAKEN = frozenset({"actor", "engine", "external", EVAL, "host", "reward", "router"})
"""Names that other processes of a job, or the trained model, have."""


def served_beside(config: Config) -> dict[str, tuple[str, ServingConfig]]:
    """Every group of engines beside those of the trained model: its name → its section and its settings."""
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
    if config.eval.fleet is not None and not config.eval.enabled:
        yield Problem("eval.fleet", "has nothing to evaluate; set eval.data")
