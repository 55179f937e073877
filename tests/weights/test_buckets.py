"""Buckets: how large they are where nobody says, and how tensors are cut into them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.weights.buckets import TensorSpec, bucket_size, plan_buckets
from asyncrl.weights.transports import bucket_bytes_of

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("model_bytes", "gpu_bytes", "mib"),
    [
        (1_192_000_000, 80 * GIB, 64),  # Qwen3-0.6B
        (8_044_000_000, 80 * GIB, 255),  # Qwen3-4B
        (16_381_000_000, 80 * GIB, 512),  # Qwen3-8B
        (141_000_000_000, 141 * GIB, 512),
        (16_381_000_000, 24 * GIB, 192),
        (16_381_000_000, None, 64),
    ],
)
def test_a_model_travels_in_about_thirty_buckets_of_what_its_gpu_spares(
    model_bytes: int, gpu_bytes: int | None, mib: int
) -> None:
    assert bucket_size(model_bytes, gpu_bytes) // MIB == mib


@given(model_bytes=st.integers(0, 1 << 42), gpu_bytes=st.integers(1 << 30, 1 << 40))
def test_no_bucket_is_larger_than_a_gpu_spares(model_bytes: int, gpu_bytes: int) -> None:
    size = bucket_size(model_bytes, gpu_bytes)
    assert 0 < size <= min(512 * MIB, gpu_bytes // 128)
    assert size >= min(64 * MIB, gpu_bytes // 128)


def test_the_size_that_a_job_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(6_000_000_000)

    def taken(**weights: Any) -> int:
        return bucket_bytes_of(Config(model={"path": tmp_path}, weights=weights))  # type: ignore[arg-type]

    assert (taken(), taken(bucket_mib=7)) == (64 * MIB, 7 * MIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    assert (taken(), taken(bucket_mib=7)) == (200_000_000, 7 * MIB)


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(4, 200))
def test_tensors_stay_in_order_and_only_one_alone_exceeds_the_size(sizes: list[int], most: int) -> None:
    specs = [TensorSpec(str(i), "float32", (n,)) for i, n in enumerate(sizes)]
    buckets = plan_buckets(specs, most)
    assert [spec for bucket in buckets for spec in bucket] == specs
    assert all(len(bucket) == 1 or sum(spec.size_bytes for spec in bucket) <= most for bucket in buckets)
