"""The files of a Hugging Face model directory: which of them are weights, and a view that joins two directories."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.errors import ModelError

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx)(\.index\.json)?")


def is_weights(file: Path) -> bool:
    """Whether a file of a model directory holds weights or says in which file they are, by its name."""
    return _WEIGHTS.fullmatch(file.name) is not None


def safetensors_files(directory: Path) -> list[Path]:
    """The files that hold a model's weights, as its index names them; nothing is opened but that.

    Raises ModelError for other formats, and for an index that is none.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error}") from None
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    raise ModelError(
        f"{directory} has neither model.safetensors nor model.safetensors.index.json; other weight "
        f"formats are not read: save the model with save_pretrained(..., safe_serialization=True)"
    )


def weights_bytes(directory: Path) -> int:
    """Size of a model's weights on disk."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


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
