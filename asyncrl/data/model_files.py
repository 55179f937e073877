"""The files of a Hugging Face model directory: which of them are weights, and a view that joins two directories."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx)(\.index\.json)?")


def is_weights(file: Path) -> bool:
    """Whether a file of a model directory holds weights or says in which file they are, by its name."""
    return _WEIGHTS.fullmatch(file.name) is not None


@contextmanager
def as_model(checkpoint: Path, model: Path) -> Iterator[Path]:
    """A Hugging Face directory with the weights of `checkpoint`: itself, where it has a config, or links to its files
    beside those of `model` that are no weights."""
    if (checkpoint / "config.json").is_file():
        yield checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="asyncrl-evaluation-") as directory:
        for source, weights in ((model, False), (checkpoint, True)):
            for file in source.iterdir():
                if file.is_file() and is_weights(file) == weights:
                    (Path(directory) / file.name).symlink_to(file.absolute())
        yield Path(directory)
