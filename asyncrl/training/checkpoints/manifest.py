"""The manifest of a checkpoint: one JSON file, written last. Pure data, no I/O and no torch."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from asyncrl.errors import CheckpointError, counted

MANIFEST = "manifest.json"
FORMAT = 3
"""Raised when a reader of the former number could not read the directory. 1 had no roles; 2 had shards that the layout
which wrote them could read alone."""


class FileRecord(msgspec.Struct, frozen=True):
    """Size and checksum of a file when it was written."""

    size_bytes: int
    crc32: int


class SavedLayout(msgspec.Struct, frozen=True):
    """The ranks whose shards are in the directory."""

    ranks: int
    tensor_parallel: int

    def __str__(self) -> str:
        data_parallel = self.ranks // self.tensor_parallel
        return f"{counted(self.ranks, 'rank')} (tensor parallel {self.tensor_parallel}, data parallel {data_parallel})"


class SavedTensor(msgspec.Struct, frozen=True):
    """A tensor of a model, under its Hugging Face name."""

    dtype: str
    """The dtype of training; the export beside it may be narrower."""
    shape: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint after `step` trained batches."""

    format: int = FORMAT
    serial: int
    """Counts the checkpoints of a run directory in the order of writing. A job goes on from the one with the highest
    serial, which after a set-back need not have the highest step."""
    step: int
    attempt: int
    """The attempt of the job that wrote it."""
    written_at: float
    """Unix time."""
    layout: SavedLayout
    roles: dict[str, dict[str, SavedTensor]]
    """The tensors of each role's model, by role and name."""
    files: dict[str, FileRecord]
    """Every other file of the directory by its relative path."""


class Wrote(msgspec.Struct, frozen=True, tag=True):
    """A rank has written its part of checkpoint `number`, or says in `problem` why it could not."""

    number: int
    files: dict[str, FileRecord]
    problem: str = ""


def encode_manifest(manifest: Manifest) -> bytes:
    """As indented JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode_manifest(text: bytes, where: object) -> Manifest:
    """Reads a manifest. Raises CheckpointError, which names `where`, for one that this version cannot read."""
    try:
        version = msgspec.json.decode(text, type=dict[str, object]).get("format")
        if version != FORMAT:
            raise CheckpointError(f"{where} has format {version}; this version of asyncrl reads format {FORMAT}")
        return msgspec.json.decode(text, type=Manifest)
    except msgspec.DecodeError as error:  # also of a field that is missing
        raise CheckpointError(f"{where} is damaged: {error}") from None


def check_roles(manifest: Manifest, roles: Collection[str], where: object) -> None:
    """Raises CheckpointError unless the checkpoint holds exactly the roles of the job."""
    if manifest.roles.keys() != set(roles):
        saved, wanted = ", ".join(sorted(manifest.roles)), ", ".join(sorted(roles))
        raise CheckpointError(
            f"{where} holds the roles {saved}, and this job has {wanted}; begin anew from its weights: "
            f"model.path = {where}/model and checkpoint.resume = never"
        )
