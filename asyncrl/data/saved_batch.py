"""Rollout batches as files, for inspection and replay: tensors as safetensors, everything else as JSON beside them.

Invariants
- The JSON file is written last and removed first. If it exists, the tensors beside it belong to the same batch.
- No pickle.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.data.batch import RolloutBatch
from asyncrl.data.sample import VersionSpan
from asyncrl.errors import DataError

FORMAT = 2
"""Number of the file format; it grows when older readers cannot read the files. Format 1 had tensors over response
tokens only."""
ROLLOUTS = "rollouts"
"""Name of the folder in the run directory where `debug.save_rollouts` keeps its batches."""
_COLUMN = "columns."
_NAME = re.compile(r"rollout-(\d{6,})\.json")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SavedBatch:
    """A batch read from files, with the facts that were saved beside it."""

    batch: RolloutBatch
    facts: Mapping[str, Any]
    """Plain JSON types, as `save_batch` got them."""


def batch_paths(directory: Path, rollout_id: int) -> tuple[Path, Path]:
    """Returns the paths that `save_batch` writes: the tensors, and the JSON file."""
    stem = directory / f"rollout-{rollout_id:06d}"
    return stem.with_suffix(".safetensors"), stem.with_suffix(".json")


def save_batch(batch: RolloutBatch, directory: Path, facts: Mapping[str, Any]) -> Path:
    """Writes the batch and `facts` (plain JSON types); returns the path of the tensors.

    Raises OSError or SafetensorError when the files cannot be written.
    """
    tensors_path, json_path = batch_paths(directory, batch.rollout_id)
    directory.mkdir(parents=True, exist_ok=True)
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    tensors = {name: value.contiguous() for name, value in fields.items() if isinstance(value, Tensor)}
    columns = {f"{_COLUMN}{name}": column.contiguous() for name, column in batch.columns.items()}
    json_path.unlink(missing_ok=True)
    save_file(tensors | columns, tensors_path)
    rest = {name: value for name, value in fields.items() if name not in tensors and name != "columns"}
    rest["versions"] = [[msgspec.structs.asdict(span) for span in spans] for spans in batch.versions]
    partial = json_path.with_suffix(".partial")
    partial.write_text(json.dumps({**facts, "format": FORMAT, "batch": rest}, indent=2) + "\n")
    partial.rename(json_path)
    return tensors_path


def keep_batch(batch: RolloutBatch, directory: Path, facts: Mapping[str, Any]) -> None:
    """Like `save_batch`, but only warns when the files cannot be written: a full disk must not end the run."""
    try:
        save_batch(batch, directory, facts)
    except (OSError, SafetensorError) as error:
        _log.warning("a rollout batch was not saved", rollout_id=batch.rollout_id, error=str(error))


def saved_rollouts(directory: Path) -> tuple[int, ...]:
    """Returns the rollout ids of the batches in a directory, ascending. Raises DataError if it cannot be read."""
    try:
        names = [_NAME.fullmatch(path.name) for path in directory.iterdir()]
    except OSError as error:
        raise DataError(f"{directory} cannot be read: {error.strerror}") from error
    return tuple(sorted(int(name[1]) for name in names if name is not None))


def load_batch(directory: Path, rollout_id: int) -> SavedBatch:
    """Reads a batch that `save_batch` wrote. Raises DataError, which names the file."""
    tensors_path, json_path = batch_paths(directory, rollout_id)
    try:
        facts = json.loads(json_path.read_text())
        rest, version = facts.pop("batch"), facts.pop("format", 1)
        if version != FORMAT:
            raise DataError(
                f"{json_path} has format {version}, and this version of asyncrl reads format {FORMAT}; "
                "save the rollouts again with debug.save_rollouts"
            )
        tensors = load_file(tensors_path)
        columns = {name: tensors.pop(name) for name in tuple(tensors) if name.startswith(_COLUMN)}
        batch = RolloutBatch(
            **tensors,
            columns={name.removeprefix(_COLUMN): column for name, column in columns.items()},
            rollout_id=rest["rollout_id"],
            group_ids=tuple(rest["group_ids"]),
            sample_ids=tuple(rest["sample_ids"]),
            versions=tuple(tuple(VersionSpan(**span) for span in spans) for spans in rest["versions"]),
            temperature=rest["temperature"],
        )
    except OSError as error:
        raise DataError(f"{error.filename or tensors_path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise DataError(f"{json_path} and the tensors beside it are not a saved batch: {error}") from error
    return SavedBatch(batch, facts)
