"""Files of a checkpoint: what is written is what safetensors reads, and its record is that of the file."""

from __future__ import annotations

import random
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from asyncrl.training.checkpoints.files import read_record, write_bytes, write_tensors
from asyncrl.training.checkpoints.manifest import FileRecord, SavedLayout
from asyncrl.training.checkpoints.saved_shards import SavedShards
from asyncrl.training.checkpoints.shard import Shard, Snapshot, capture_rng, restore_rng, write_snapshots
from asyncrl.training.ranks.layout import RankLayout

TENSORS = {
    "odd number of bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "step": torch.tensor(7.0),
    "nothing": torch.zeros(0, 4),
    "half": torch.randn(5, 3).bfloat16(),
    "double": torch.randn(2, 2, dtype=torch.float64),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "mask": torch.tensor([True, False]),
    "ids": torch.tensor([-1, 2**40]),
    "größer": torch.full((3,), float("nan")),
}


def test_tensors_come_back_as_they_were_with_the_record_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tensors.safetensors"
    record = write_tensors(path, TENSORS)
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].nan_to_num(nan=-5.0), tensor.nan_to_num(nan=-5.0)), name
    data = path.read_bytes()
    assert record == read_record(path) == FileRecord(len(data), zlib.crc32(data))


def test_a_record_notices_one_flipped_bit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    record = write_bytes(path, bytes(100))
    path.write_bytes(bytes(50) + b"\x01" + bytes(49))
    assert read_record(path).size_bytes == record.size_bytes
    assert read_record(path) != record


def test_other_threads_have_their_turn_while_a_large_tensor_is_written(tmp_path: Path) -> None:
    tensors = {"large": torch.ones(300, 1 << 18)}  # 300 MiB
    writer = threading.Thread(target=write_tensors, args=(tmp_path / "large", tensors))
    turns = 0
    began = time.perf_counter()
    writer.start()
    while writer.is_alive():
        time.sleep(0.001)
        turns += 1
    seconds = time.perf_counter() - began
    (tmp_path / "large").unlink()
    assert turns > seconds / 0.02


def test_a_shard_is_read_back_on_its_own_rank_and_generators_go_on_where_they_were(tmp_path: Path) -> None:
    layouts = [RankLayout(rank, 2, rank, 1) for rank in (0, 1)]
    cpu = torch.device("cpu")

    def draw() -> tuple[float, float, float, float]:
        return random.random(), random.gauss(0, 1), float(np.random.normal()), torch.rand(1).item()

    draw()  # leaves a second normal number waiting in Python's and numpy's generators
    rng = capture_rng({"model-parallel": torch.arange(4, dtype=torch.uint8)}, cpu)
    expected = [draw(), draw()]
    snapshot = Snapshot(Shard({**rng.tensors, "weight": torch.ones(2)}, rng.facts))
    write_snapshots({"actor": Snapshot(Shard({}))}, tmp_path, layouts[0])
    files = write_snapshots({"actor": snapshot}, tmp_path, layouts[1])
    assert list(files) == [f"trainer/actor/rank-00001-of-00002.{kind}" for kind in ("safetensors", "json")]
    shard = SavedShards(tmp_path, SavedLayout(2, 1), layouts[1], "actor").own()
    trackers = restore_rng(shard, cpu)
    assert [draw(), draw()] == expected
    assert trackers["model-parallel"].tolist() == [0, 1, 2, 3]
    assert torch.equal(shard.tensors["weight"], torch.ones(2))
