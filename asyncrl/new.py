"""`asyncrl new DIR`: a loop, a recipe and a reward of one's own to begin with. What it writes runs as it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path

from asyncrl.errors import ConfigError

LOOPS = {"train": "train.py", "train_async": "train_async.py", "own": "own_loop.py"}
"""What `--loop` takes, and the loop that is copied for it."""

_PATHS = {
    'dir = "runs/demo"': 'dir = "runs/first"',
    "runs/demo-2, runs/demo-3": "runs/first-2, runs/first-3",
    'function = "exact_match"': 'function = "rewards:score"             # of rewards.py beside this file',
}


def write_project(directory: Path, loop: str) -> tuple[Path, ...]:
    """Writes the three files into `directory`, which is made where it is missing; returns them.

    Raises ConfigError where one of them is there already.
    """
    made: dict[str, Callable[[str], str]] = {LOOPS[loop]: _loop, "recipe.toml": _recipe, "rewards.py": str}
    sources = {LOOPS[loop]: LOOPS[loop], "recipe.toml": "recipes/demo.toml", "rewards.py": "demo/rewards.py"}
    present = [name for name in made if (directory / name).exists()]
    if present:
        raise ConfigError(f"{directory} holds {', '.join(present)} already; name another directory")
    directory.mkdir(parents=True, exist_ok=True)
    for name, change in made.items():
        with as_file(files("asyncrl") / sources[name]) as source:
            shutil.copyfile(source, directory / name)
        (directory / name).write_text(change((directory / name).read_text()))
    return tuple(directory / name for name in made)


def _loop(text: str) -> str:
    return text.replace("entrypoints/recipes/demo.toml", "recipe.toml").replace("entrypoints/", "")


def _recipe(text: str) -> str:
    for ours, theirs in _PATHS.items():
        assert text.count(ours) == 1, f"the demo's recipe has {ours} once"
        text = text.replace(ours, theirs)
    return text
