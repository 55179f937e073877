"""A model directory and a recipe that are valid, so that a test changes only what it is about."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.machine import Machine
from asyncrl.config.problems import InvalidConfigError
from asyncrl.config.reading.loaded import LoadedConfig
from asyncrl.config.reading.loading import parse_command_line, resolve

Load = Callable[..., LoadedConfig]
Refused = Callable[..., dict[str, str]]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe in the current directory, with the model and the data that it names."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"max_position_embeddings": 512, "num_attention_heads": 4, "num_key_value_heads": 2})
    )
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    path = tmp_path / "recipe.toml"
    path.write_text('[model]\npath = "model"\n[data]\nsource = "train.jsonl"\n[run]\ndir = "run"\n')
    return path


@pytest.fixture
def load(recipe: Path) -> Load:
    """Resolves the recipe with more arguments; `toml` is a second file laid over it."""

    def load(*argv: str, toml: str = "", machine: Machine | None = None) -> LoadedConfig:
        files = ["@", recipe.name]
        if toml:
            Path("more.toml").write_text(toml)
            files += ["@", "more.toml"]
        return resolve(parse_command_line([*files, *argv]), machine or Machine())

    return load


@pytest.fixture
def refused(load: Load) -> Refused:
    """The problems of a configuration that must be refused: key → text."""

    def refused(*argv: str, toml: str = "", machine: Machine | None = None) -> dict[str, str]:
        with pytest.raises(InvalidConfigError) as caught:
            load(*argv, toml=toml, machine=machine)
        return {problem.key: problem.text for problem in caught.value.problems}

    return refused
