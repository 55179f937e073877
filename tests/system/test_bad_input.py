"""Bad input ends in one message that names the thing and the fix, a non-zero exit code, and nothing left running."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.jobs import refused, write_recipe

pytestmark = [pytest.mark.system, pytest.mark.timeout(450)]


@pytest.fixture
def recipe(tmp_path: Path, tiny_models: tuple[Path, Path]) -> Path:
    return write_recipe(tmp_path, tiny_models[0])


@pytest.fixture
def boots_nothing(tmp_path: Path, tiny_models: tuple[Path, Path]) -> Path:
    """A recipe for what is found while engines boot, whosever they are: its engine is external and never answers."""
    return write_recipe(tmp_path, tiny_models[0], engine_url="http://127.0.0.1:9")


def test_a_model_directory_that_is_missing(recipe: Path) -> None:
    assert "model.path" in refused(recipe, "--model.path", "/nowhere/model")


def test_a_model_type_that_cannot_be_trained(recipe: Path, tmp_path: Path, tiny_models: tuple[Path, Path]) -> None:
    model = shutil.copytree(tiny_models[0], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "mamba2", "architectures": ["Mamba2"]}))
    message = refused(recipe, "--model.path", str(model))
    assert "mamba2" in message and "qwen3" in message


def test_an_unknown_key_and_impossible_batch_sizes_are_told_together(recipe: Path) -> None:
    message = refused(recipe, "--train.lrr", "1e-3", "--train.minibatches", "3")
    assert "train.lr?" in message and "train.minibatches" in message


def test_a_record_that_lacks_the_prompt_ends_the_engine_that_boots(recipe: Path) -> None:
    data = recipe.parent / "prompts.jsonl"
    data.write_text('{"prompt": "fine"}\n{"question": "not fine"}\n')
    message = refused(recipe, "--data.answer-key", "none")
    assert "line 2" in message and '"prompt"' in message and "question" in message and "data.prompt_key" in message


def test_a_dataset_that_is_missing(boots_nothing: Path) -> None:
    (boots_nothing.parent / "prompts.jsonl").unlink()
    message = refused(boots_nothing)
    assert "data.source" in message and "prompts.jsonl does not exist" in message


def test_a_run_directory_that_no_system_could_make(recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("[run]\ndir = ", '[run]\ndir = "a\\u0000b"\nexport = true\n# '))
    assert "run.dir: 'a\\x00b' is not allowed" in refused(recipe)


def test_an_empty_dataset(boots_nothing: Path) -> None:
    (boots_nothing.parent / "prompts.jsonl").write_text("")
    assert "prompts.jsonl" in refused(boots_nothing)


def test_a_reward_that_does_not_import(boots_nothing: Path) -> None:
    assert "no_such_module" in refused(boots_nothing, "--reward.function", "no_such_module:reward")


def test_a_port_that_is_taken(recipe: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused(recipe, "--router.port", str(port))
    assert str(port) in message and "router.port" in message


def test_an_engine_that_dies_at_start_is_shown_with_its_last_words(recipe: Path) -> None:
    message = refused(recipe, "--engine.server-args.chat-template", "/no/such/template.jinja")
    assert re.search(r"engine-0 .* exited with code \d+ before its first generation", message), message
    assert re.search(r"Last lines of .*engine-0\.log(.|\n)*no/such/template", message), message


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a file system: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk(recipe: Path, tiny_disk: Path) -> None:
    (tiny_disk / "ballast").write_bytes(b"\0" * 120 * 1024)
    message = refused(recipe, "--run.dir", str(tiny_disk / "run"))
    assert "space" in message.lower() and str(tiny_disk) in message
