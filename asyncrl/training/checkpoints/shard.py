"""One rank's part of a checkpoint, by role: optimizer state, weights in full precision, random number generators."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from asyncrl.training.checkpoints.files import write_bytes, write_tensors
from asyncrl.training.checkpoints.manifest import FileRecord
from asyncrl.training.checkpoints.slices import Piece
from asyncrl.training.models.model_directory import HuggingFaceModel
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.training.roles import ACTOR

SHARDS = "trainer"
"""Directory of the shards in a checkpoint, one folder for each role."""
MODEL = "model"
"""Directory of the actor's Hugging Face export in a checkpoint."""
_RNG = "rng."


@dataclass(frozen=True, slots=True)
class Shard:
    """State of one role on one rank. The backend decides what the names mean."""

    tensors: dict[str, Tensor]
    """In host memory, shared with nobody."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Everything else, as JSON."""
    pieces: dict[str, Piece] = field(default_factory=dict)
    """What this rank holds of the model's parameters, by names that are the same in every layout. The tensors of a
    piece are flat and have the names of `piece_name`."""


class ShardFacts(msgspec.Struct, frozen=True):
    """The file beside the tensors of a shard."""

    facts: dict[str, Any]
    pieces: dict[str, Piece]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one rank writes of one role: a copy in host memory, so that training can go on meanwhile."""

    shard: Shard
    model: HuggingFaceModel | None = None
    """The export; rank 0 writes it."""


def piece_name(parameter: str, kind: str) -> str:
    """The tensor with one state of a parameter: its weights, or a moment of its updates."""
    return f"{parameter}.{kind}"


def shard_paths(directory: Path, rank: int, ranks: int, role: str) -> tuple[Path, Path]:
    """The paths of the tensors and of the facts of one role on one of `ranks` ranks."""
    stem = directory / SHARDS / role / f"rank-{rank:05d}-of-{ranks:05d}"
    return stem.with_suffix(".safetensors"), stem.with_suffix(".json")


def write_snapshots(snapshots: Mapping[str, Snapshot], directory: Path, layout: RankLayout) -> dict[str, FileRecord]:
    """Writes one rank's part of every role into a staged checkpoint; returns its files by relative path.

    Raises OSError.
    """
    written = {}
    for role, snapshot in snapshots.items():
        tensors_path, facts_path = shard_paths(directory, layout.rank, layout.world_size, role)
        tensors_path.parent.mkdir(parents=True, exist_ok=True)
        written[tensors_path] = write_tensors(tensors_path, snapshot.shard.tensors)
        facts = ShardFacts(snapshot.shard.facts, snapshot.shard.pieces)
        written[facts_path] = write_bytes(facts_path, msgspec.json.encode(facts) + b"\n")
        if snapshot.model is not None:
            written |= snapshot.model.write(directory / (MODEL if role == ACTOR else f"{MODEL}-{role}"))
    return {str(path.relative_to(directory)): record for path, record in written.items()}


def capture_rng(trackers: Mapping[str, Tensor], device: torch.device) -> Shard:
    """Copies the states of torch's, Python's, numpy's and the GPU's generators, and of named ones of a backend."""
    tensors = {f"{_RNG}tracker.{name}": state.cpu().clone() for name, state in trackers.items()}
    tensors[f"{_RNG}torch"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors[f"{_RNG}cuda"] = torch.cuda.get_rng_state(device)
    numpy_state: Any = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
    return Shard(tensors, {"rng": {"python": random.getstate(), "numpy": numpy_state}})


def restore_rng(shard: Shard, device: torch.device) -> dict[str, Tensor]:
    """Sets every generator of `capture_rng` except those of the backend.

    Returns the states of the latter by name, for the backend to set.
    """
    torch.set_rng_state(shard.tensors[f"{_RNG}torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(shard.tensors[f"{_RNG}cuda"], device)
    rng = shard.facts["rng"]
    version, state, gauss = rng["python"]
    random.setstate((version, tuple(state), gauss))
    numpy_state = rng["numpy"]
    key = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
    prefix = f"{_RNG}tracker."
    named = {name: state for name, state in shard.tensors.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): state.clone() for name, state in named.items()}
