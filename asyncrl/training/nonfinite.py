"""Keeps the batch on which a loss or gradient became NaN or infinite, so that it can be looked at."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from asyncrl.data.batch import RolloutBatch


def dump_paths(directory: Path, rollout_id: int) -> tuple[Path, Path]:
    """Where `save_batch` writes: tensors, and everything else."""
    stem = directory / f"rollout-{rollout_id:06d}"
    return stem.with_suffix(".safetensors"), stem.with_suffix(".json")


def save_batch(batch: RolloutBatch, directory: Path, facts: dict[str, Any]) -> Path:
    """Writes the batch's tensors as safetensors, its ids and `facts` as JSON beside them; returns the first path."""
    tensors_path, json_path = dump_paths(directory, batch.rollout_id)
    directory.mkdir(parents=True, exist_ok=True)
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    tensors = {name: value.contiguous() for name, value in fields.items() if isinstance(value, Tensor)}
    save_file(tensors, tensors_path)
    rest = {name: value for name, value in fields.items() if name not in tensors}
    rest["versions"] = [[dataclasses.asdict(span) for span in spans] for spans in batch.versions]
    json_path.write_text(json.dumps({**facts, "batch": rest}, indent=2) + "\n")
    return tensors_path
