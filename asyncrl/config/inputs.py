"""What a configuration points at on disk: the model's own numbers, and paths that are not there.

Only names and `config.json` are looked at, so that a mistake is told before anything starts; what is inside the files
is checked by those who read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.problems import Problem
from asyncrl.config.root import Config


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Numbers of a Hugging Face `config.json` that arithmetic depends on; None where it does not say."""

    context_length: int | None = None
    attention_heads: int | None = None
    key_value_heads: int | None = None


def read_model_facts(path: Path) -> ModelFacts | None:
    """The facts of a model directory; None where there is none yet or it cannot be read."""
    try:
        declared = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(declared, dict):
        return None

    def number(key: str) -> int | None:
        value = declared.get(key)
        return value if isinstance(value, int) and value > 0 else None

    heads = number("num_attention_heads")
    return ModelFacts(number("max_position_embeddings"), heads, number("num_key_value_heads") or heads)


def input_problems(config: Config) -> list[Problem]:
    """Inputs that are not set, are not there, or would be erased."""
    problems = list(_model_problems(config))
    for key, source, needed in _sources(config):
        if not source and needed:
            problems.append(
                Problem(
                    key,
                    "is not set; give a .jsonl or .parquet file, a dataset directory, reasoning_gym:TASK or "
                    "package.module:function",
                )
            )
        elif source and needed and _is_path(source) and not Path(source).exists():
            problems.append(Problem(key, f"{source} does not exist (looked in {Path.cwd()})"))
    return problems + list(_erased_inputs(config))


def _model_problems(config: Config) -> Iterator[Problem]:
    path = config.model.path
    if config.model.builder is not None:
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
    """Key, source, and whether the job reads it."""
    yield "data.source", config.data.source, config.train.num_steps != 0
    yield "warmup.source", config.warmup.source, config.warmup.steps > 0
    if config.eval.data is not None:
        yield "eval.data.source", config.eval.data.source, True


def _is_path(source: str) -> bool:
    generated = source.startswith("reasoning_gym:") or (":" in source and "/" not in source)
    return not generated


def _erased_inputs(config: Config) -> Iterator[Problem]:
    if config.run.if_exists != "overwrite":
        return
    inputs = [("model.path", config.model.path)]
    inputs += [(key, Path(source)) for key, source, _ in _sources(config) if source and _is_path(source)]
    for key, path in inputs:
        if path.exists() and path.resolve().is_relative_to(config.run.dir.resolve()):
            yield Problem(
                "run.if_exists",
                f"overwrite would erase {config.run.dir}, which holds {key} ({path}); choose another run.dir",
            )
