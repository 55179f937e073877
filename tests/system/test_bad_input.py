"""Bad input ends in one message that names the thing and the fix, a non-zero exit code, and nothing left running."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.jobs import run, write_recipe

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


def refuse(recipe: Path, *options: str, timeout_s: float = 120, **how: Any) -> str:
    """Runs the job to its failure; returns the one message."""
    code, output, _ = run(recipe, *options, timeout_s=timeout_s, **how)
    assert code not in (0, -9), output
    # Of ours: an engine's own, in the last lines of its log, is indented.
    assert not any(line.startswith("Traceback") for line in output.splitlines()), output
    assert sum(line.startswith("error: ") for line in output.splitlines()) == 1, output
    return output[output.index("error: ") :]


@pytest.fixture
def recipe(tmp_path: Path, tiny_models: tuple[Path, Path]) -> Path:
    return write_recipe(tmp_path, tiny_models[0])


def test_a_model_directory_that_is_missing(recipe: Path) -> None:
    assert "model.path" in refuse(recipe, "--model.path", "/nowhere/model")


def test_a_model_type_that_cannot_be_trained(recipe: Path, tmp_path: Path, tiny_models: tuple[Path, Path]) -> None:
    model = shutil.copytree(tiny_models[0], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "mamba2", "architectures": ["Mamba2"]}))
    message = refuse(recipe, "--model.path", str(model))
    assert "mamba2" in message and "qwen3" in message


def test_an_unknown_key_and_impossible_batch_sizes_are_told_together(recipe: Path) -> None:
    message = refuse(recipe, "--train.lrr", "1e-3", "--train.minibatches", "3")
    assert "train.lr?" in message and "train.minibatches" in message


def test_a_record_that_lacks_the_prompt(recipe: Path) -> None:
    data = recipe.parent / "prompts.jsonl"
    data.write_text('{"prompt": "fine"}\n{"question": "not fine"}\n')
    message = refuse(recipe, "--data.answer-key", "none")
    assert "line 2" in message and '"prompt"' in message and "question" in message and "data.prompt_key" in message


def test_a_dataset_that_is_missing(recipe: Path) -> None:
    (recipe.parent / "prompts.jsonl").unlink()
    message = refuse(recipe)
    assert "data.source" in message and "prompts.jsonl does not exist" in message


def test_a_run_directory_that_no_system_could_make(recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("[run]\ndir = ", '[run]\ndir = "a\\u0000b"\nexport = true\n# '))
    assert "run.dir: 'a\\x00b' is not allowed" in refuse(recipe)


def test_an_empty_dataset(recipe: Path) -> None:
    (recipe.parent / "prompts.jsonl").write_text("")
    assert "prompts.jsonl" in refuse(recipe)


def test_a_reward_that_does_not_import(recipe: Path) -> None:
    assert "no_such_module" in refuse(recipe, "--reward.function", "no_such_module:reward")


def test_a_port_that_is_taken(recipe: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refuse(recipe, "--router.port", str(port))
    assert str(port) in message and "router.port" in message


def test_an_engine_that_dies_at_start_is_shown_with_its_last_words(recipe: Path) -> None:
    message = refuse(recipe, "--engine.server-args.chat-template", "/no/such/template.jinja")
    assert "engine-0" in message and "no/such/template" in message


def test_a_reward_that_fails_on_the_first_batch(recipe: Path) -> None:
    (recipe.parent / "my_rewards.py").write_text("def broken(sample, prompt):\n    return 1 / 0\n")
    message = refuse(
        recipe,
        *("--reward.function", "my_rewards:broken", "--reward.args", "{}"),
        timeout_s=180,
        env={"PYTHONPATH": str(recipe.parent)},
    )
    assert "my_rewards:broken failed on 9 of the first 16 samples" in message and "division by zero" in message


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
    message = refuse(recipe, "--run.dir", str(tiny_disk / "run"))
    assert "space" in message.lower() and str(tiny_disk) in message
