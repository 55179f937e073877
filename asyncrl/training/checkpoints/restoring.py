"""A rank takes the state of a role from a checkpoint, which rank 0 found intact."""

from __future__ import annotations

from pathlib import Path

from asyncrl.errors import CheckpointError
from asyncrl.training.checkpoints.manifest import SavedTensor
from asyncrl.training.checkpoints.saved_shards import SavedShards
from asyncrl.training.checkpoints.store import read_manifest
from asyncrl.training.learner.backend import Backend
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.weights.buckets import TensorSpec


def restore(backend: Backend, directory: Path, layout: RankLayout, role: str) -> None:
    """Gives `backend`, which has fresh weights, the state of `role`, whatever layout wrote it.

    Raises CheckpointError where the checkpoint is one of another model or optimizer, or a shard cannot be read.
    """
    manifest = read_manifest(directory)
    saved = manifest.roles[role]
    wanted = saved_tensors(backend.tensor_specs())
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise CheckpointError(
                f"{directory} is a checkpoint of another model: {name} is {_in_words(saved.get(name))} there and "
                f"{_in_words(wanted.get(name))} in this job; set model.path and model.dtype as they were"
            )
    backend.restore(SavedShards(directory, manifest.layout, layout, role))


def saved_tensors(specs: tuple[TensorSpec, ...]) -> dict[str, SavedTensor]:
    """The model as a manifest describes it."""
    return {spec.name: SavedTensor(spec.dtype, spec.shape) for spec in specs}


def _in_words(tensor: SavedTensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
