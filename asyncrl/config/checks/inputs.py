"""Inputs that a configuration names: the model's own numbers, paths that do not exist, code that cannot be found.

The checks look at names and at the model's JSON files only, so that a mistake is told before anything starts. The code
that reads an input later checks its content.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.checks.named_code import (
    algorithm_problems,
    filter_problems,
    function_problems,
    is_generated,
    reward_problems,
    source_problems,
)
from asyncrl.config.checks.trackers import tracker_problems
from asyncrl.config.problems import Problem
from asyncrl.config.root import Config
from asyncrl.config.sections.data import DataConfig


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Numbers of a Hugging Face `config.json` that other settings must fit; None where the file does not say."""

    context_length: int | None = None
    attention_heads: int | None = None
    key_value_heads: int | None = None


def read_model_facts(path: Path) -> ModelFacts | None:
    """The facts of a model directory; None where it does not exist yet or cannot be read."""
    declared = _json_object(path / "config.json")
    if declared is None:
        return None

    def number(key: str) -> int | None:
        value = declared.get(key)
        return value if isinstance(value, int) and value > 0 else None

    heads = number("num_attention_heads")
    return ModelFacts(number("max_position_embeddings"), heads, number("num_key_value_heads") or heads)


def input_problems(config: Config) -> Iterator[Problem]:
    """Inputs that are not set, are not there, or would be erased."""
    yield from _model_problems(config)
    yield from reward_problems(config.reward)
    yield from _template_problems(config)
    yield from filter_problems(config.rollout.filters)
    yield from algorithm_problems(config.train, config.algorithm)
    yield from tracker_problems(config.track)
    for key, source, needed in _sources(config):
        if not needed:
            continue
        if not source:
            yield Problem(
                key,
                "is not set; give a file (.jsonl, .json, .csv, .parquet), a dataset directory, reasoning_gym:TASK or "
                "package.module:function",
            )
        elif is_generated(source):
            yield from source_problems(key, source)
        elif not Path(source).exists():
            yield Problem(key, f"{source} does not exist (looked in {Path.cwd()})")
    saved = config.debug.load_rollouts
    if config.debug.train_only and saved is not None and not saved.is_dir():
        yield Problem("debug.load_rollouts", f"{saved} is no directory (looked in {Path.cwd()})")
    yield from _checkpoint_problems(config)
    yield from _erased_inputs(config)


def _model_problems(config: Config) -> Iterator[Problem]:
    path = config.model.path
    if config.model.builder is not None:
        yield from function_problems("model.builder", config.model.builder)
        return
    if not path.exists():
        yield Problem(
            "model.path",
            f"{path} does not exist (looked in {Path.cwd()}); give a local Hugging Face directory (nothing is "
            "downloaded), or set model.builder to a function that makes one",
        )
    elif not path.is_dir():
        yield Problem("model.path", f"{path} is a file; give the directory that holds config.json and the safetensors")
    elif not (path / "config.json").is_file():
        yield Problem("model.path", f"{path} holds no config.json, so it is no Hugging Face model directory")


def _sources(config: Config) -> Iterator[tuple[str, str, bool]]:
    """Each source of prompts: its key, its value, and whether the job reads it."""
    yield "data.source", config.data.source, config.train.num_steps != 0 and not config.debug.train_only
    yield "warmup.source", config.warmup.source, config.warmup.steps > 0
    if config.eval.data is not None:
        yield "eval.data.source", config.eval.data.source, True


def _template_problems(config: Config) -> Iterator[Problem]:
    """Settings that need a chat template, where the model has none."""
    if _has_chat_template(config.model.path) is not False:
        return
    sources: list[tuple[str, DataConfig | None]] = [("data", config.data), ("eval.data", config.eval.data)]
    for key, data in sources:
        if data is not None and data.chat_template is True:
            yield Problem(f"{key}.chat_template", f"the tokenizer in {config.model.path} has no chat template")
        elif data is not None and data.chat_template == "auto":
            yield from _without_place(data, key, f"the tokenizer in {config.model.path} has no chat template")


def _without_place(data: DataConfig, key: str, why: str) -> Iterator[Problem]:
    if data.system_prompt is not None:
        yield Problem(
            f"{key}.system_prompt",
            f"has no place in plain prompts, and {why}; take it out, or write it into the prompts",
        )
    if data.chat_template_args:
        yield Problem(f"{key}.chat_template_args", f"have no effect, because {why}; take them out")


def _has_chat_template(path: Path) -> bool | None:
    """Whether the tokenizer has one; None where the directory does not say."""
    if any(path.glob("chat_template*")) or (path / "additional_chat_templates").exists():
        return True
    declared = _json_object(path / "tokenizer_config.json")
    return None if declared is None else bool(declared.get("chat_template"))


def _json_object(path: Path) -> dict[str, Any] | None:
    """The content of a JSON file; None where there is no such file, or no object in it."""
    try:
        declared = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return declared if isinstance(declared, dict) else None


def _checkpoint_problems(config: Config) -> Iterator[Problem]:
    """A checkpoint to begin from that is not there. A run that has one of its own does not need it any more."""
    path = config.checkpoint.resume
    if not isinstance(path, Path) or config.debug.rollout_only or any((config.run.dir / "checkpoints").glob("step-*")):
        return
    if not path.exists():
        yield Problem("checkpoint.resume", f"{path} does not exist (looked in {Path.cwd()})")
    elif not (path / "manifest.json").is_file():
        yield Problem(
            "checkpoint.resume",
            f"{path} is no checkpoint (it holds no manifest.json); give a run's checkpoints/step-N",
        )


def _erased_inputs(config: Config) -> Iterator[Problem]:
    if config.run.if_exists != "overwrite":
        return
    named = {
        "model.path": config.model.path,
        "algorithm.reference": config.algorithm.reference,
        "algorithm.teacher": config.algorithm.teacher,
        "debug.load_rollouts": config.debug.load_rollouts,
        "checkpoint.resume": config.checkpoint.resume,
        **{f"models.{name}.path": model.path for name, model in config.models.items()},
    }
    inputs = [(key, path) for key, path in named.items() if isinstance(path, Path)]
    inputs += [(key, Path(source)) for key, source, _ in _sources(config) if source and not is_generated(source)]
    for key, path in inputs:
        if path.exists() and path.resolve().is_relative_to(config.run.dir.resolve()):
            yield Problem(
                "run.if_exists",
                f"overwrite would erase {config.run.dir}, which holds {key} ({path}); choose another run.dir",
            )
