"""Writes files that are on the disk when the call returns, with their size and checksum.

Invariants
- The checksum is that of the bytes in memory, taken while they are written. Nothing is read back here; a later reader
  notices what the disk has made of them. (safetensors' own writer takes no checksum, does not sync, and reports a full
  disk as something else than an OSError.)
- The writing thread lets other threads run in between, however large a tensor is.
- No pickle: tensors are safetensors, everything else is bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.training.checkpoints.manifest import FileRecord

_CHUNK_BYTES = 16 << 20
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Writes tensors of host memory as safetensors: an 8-byte length, a JSON header, the data.

    Raises OSError; the file is then incomplete.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps every tensor aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def chunks() -> Iterator[memoryview]:
        yield memoryview(len(text).to_bytes(8, "little") + text)
        for name in order:
            flat = tensors[name].detach().contiguous().view(-1)
            if flat.numel():
                yield flat.view(torch.uint8).numpy().data

    return _write(path, chunks())


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Writes `data`. Raises OSError; the file is then incomplete."""
    return _write(path, iter([memoryview(data)]))


def read_record(path: Path) -> FileRecord:
    """Reads a file and returns its present size and checksum. Raises OSError."""
    size, crc, buffer = 0, 0, bytearray(_CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(memoryview(buffer)[:count], crc)
            size += count
    return FileRecord(size, crc)


def sync_directory(path: Path) -> None:
    """Syncs a directory, so that files created, renamed or removed in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_directory(staged: Path, target: Path, aside: Path) -> None:
    """Renames `staged` to `target`. What was there lies in `aside` until the new one is on the disk, and goes then.

    Raises OSError. After a kill in between, `end_replacement` has either the former or the new directory in place.
    """
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    staged.rename(target)
    sync_directory(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def end_replacement(target: Path, aside: Path) -> None:
    """Ends what a killed process left of `replace_directory`. Before the next one. Raises OSError."""
    if aside.exists() and not target.exists():
        aside.rename(target)
    shutil.rmtree(aside, ignore_errors=True)


def _write(path: Path, parts: Iterator[memoryview]) -> FileRecord:
    size, crc = 0, 0
    with path.open("wb", buffering=0) as file:
        for part in parts:
            start = 0
            while start < len(part):
                count = file.write(part[start : start + _CHUNK_BYTES])
                crc = zlib.crc32(part[start : start + count], crc)
                start += count
            size += len(part)
        os.fsync(file.fileno())
    return FileRecord(size, crc)
