"""Reads back what trackers have of a run, with their own libraries."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def tensorboard_scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run_dir / "trackers" / "tensorboard"))
    read.Reload()
    return [(scalar.step, scalar.value) for scalar in read.Scalars(tag)]


def wandb_run(run_dir: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows and the configuration of an offline run, whose file is a log in LevelDB's format of wandb's records."""
    from wandb.proto import wandb_internal_pb2

    (file,) = (run_dir / "trackers" / "wandb").glob("offline-run-*/*.wandb")
    rows, config = list[dict[str, Any]](), dict[str, Any]()
    for data in leveldb_records(file.read_bytes()[7:]):  # behind wandb's own head
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        elif record.WhichOneof("record_type") == "run":
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return rows, config


def leveldb_records(data: bytes, head: int = 7) -> Iterator[bytes]:
    """Blocks of 32 KiB hold fragments (checksum, length, type); types 2, 3 and 4 are the parts of one record."""
    at, record = 0, b""
    while at + 7 <= len(data):
        left = 32768 - (at + head) % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def trackio_rows(run_dir: Path, project: str, metric: str) -> list[tuple[int, float]]:
    """Read in a process of its own: trackio takes its directory from the environment when it is imported."""
    code = (
        "import json, sys\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "name, = SQLiteStorage.get_runs(sys.argv[1])\n"
        "rows = SQLiteStorage.get_logs(sys.argv[1], name)\n"
        "print(json.dumps([[row['step'], row[sys.argv[2]]] for row in rows if sys.argv[2] in row]))"
    )
    environment: Mapping[str, str] = os.environ | {"TRACKIO_DIR": str(run_dir / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", code, project, metric], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [(step, value) for step, value in json.loads(done.stdout.splitlines()[-1])]
