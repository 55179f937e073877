"""Writes a model as a Hugging Face directory: safetensors, with config and tokenizer files copied from another one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from asyncrl.data.model_files import is_weights
from asyncrl.training.checkpoints.files import write_bytes, write_tensors
from asyncrl.training.checkpoints.manifest import FileRecord
from asyncrl.weights.buckets import TensorSpec, plan_buckets

MAX_FILE_BYTES = 4_000_000_000
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """A whole model in host memory, in the dtype in which it will be stored."""

    tensors: dict[str, Tensor]
    source: Path
    """The directory whose config and tokenizer files it has."""
    dtype: torch.dtype

    def write(self, directory: Path) -> dict[Path, FileRecord]:
        """Writes it into `directory`; as `write_model`."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        return write_model(iter(self.tensors.items()), shapes, self.source, directory, dtype=self.dtype)


def write_model(
    tensors: Iterator[tuple[str, Tensor]],
    shapes: dict[str, tuple[int, ...]],
    source: Path,
    directory: Path,
    *,
    dtype: torch.dtype,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> dict[Path, FileRecord]:
    """Writes a directory that does not exist yet; returns its files.

    Args:
        tensors: name and whole tensor, in the order of `shapes`. Only as many as fit one file are held at a time.
        source: the directory whose config and tokenizer files are copied.

    Raises:
        OSError: `directory` is then incomplete.
    """
    directory.mkdir(parents=True)
    written = {}
    for file in _other_files(source):
        data = file.read_bytes()
        written[directory / file.name] = write_bytes(
            directory / file.name, _record_dtype(data, dtype) if file.name == "config.json" else data
        )
    name_of_dtype = str(dtype).removeprefix("torch.")
    files = plan_buckets((TensorSpec(name, name_of_dtype, s) for name, s in shapes.items()), max_file_bytes)
    weight_map = {}
    for i, specs in enumerate(files, start=1):
        name_of_file = "model.safetensors" if len(files) == 1 else f"model-{i:05d}-of-{len(files):05d}.safetensors"
        part = {}
        for _ in specs:
            name, tensor = next(tensors)
            part[name] = tensor.to(device="cpu", dtype=dtype)
            weight_map[name] = name_of_file
        written[directory / name_of_file] = write_tensors(directory / name_of_file, part)
    if len(files) > 1:
        total = sum(spec.size_bytes for specs in files for spec in specs)
        path = directory / _INDEX
        written[path] = write_bytes(path, _index(weight_map, total))
    return written


def complete_model(directory: Path, source: Path) -> None:
    """Makes a Hugging Face directory of one that holds safetensors alone: adds an index, and other files of `source`.

    Raises OSError; no file is there in part then.
    """
    files = sorted(directory.glob("*.safetensors"))
    if [file.name for file in files] != ["model.safetensors"]:
        weight_map: dict[str, str] = {}
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                weight_map |= dict.fromkeys(tensors.keys(), file.name)
        _write_whole(directory / _INDEX, _index(weight_map, sum(file.stat().st_size for file in files)))
    for file in _other_files(source):
        _write_whole(directory / file.name, file.read_bytes())


def _write_whole(path: Path, data: bytes) -> None:
    try:
        write_bytes(path, data)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _other_files(source: Path) -> list[Path]:
    """The files of a model that are no weights: config and tokenizer."""
    files = sorted(source.iterdir())
    return [file for file in files if file.is_file() and not file.name.startswith(".") and not is_weights(file)]


def _index(weight_map: Mapping[str, str], total_bytes: int) -> bytes:
    return (json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2) + "\n").encode()


def _record_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """Writes `dtype` into a config.json, if it says otherwise."""
    fields = json.loads(config)
    key = "torch_dtype" if "torch_dtype" in fields else "dtype"  # spelling of transformers 4 and 5
    if fields.get(key) == (name := str(dtype).removeprefix("torch.")):
        return config
    return (json.dumps({**fields, key: name}, indent=2) + "\n").encode()
