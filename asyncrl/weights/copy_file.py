"""A recorded payload as one safetensors file.

The format is a length (8 bytes, little endian), a JSON header with the dtype, shape and place of each tensor, and the
data (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import shutil
import struct
from io import FileIO
from pathlib import Path

from asyncrl.weights.host_buffer import Recording

FILE = "model.safetensors"
_SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def write_file(recording: Recording, directory: Path) -> bool:
    """Writes the file into `directory`, over one that lies there; False where the buffer went to newer weights.

    Raises OSError, and leaves nothing in `directory` then.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE
        with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
            _write_all(file, header(recording))
            for block in recording.read():
                _write_all(file, block)
                if not recording.held:
                    return False
            file.truncate()
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return True


def header(recording: Recording) -> bytes:
    """The file up to its data."""
    offset, entries = 0, {}
    for spec in recording.payload.specs:
        end = offset + spec.size_bytes
        dtype = _SAFETENSORS_DTYPES[spec.dtype]
        entries[spec.name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
