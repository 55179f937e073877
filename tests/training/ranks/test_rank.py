"""What a rank checks before it joins the others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from asyncrl.config import machine
from asyncrl.errors import TrainerError
from asyncrl.training.ranks import rank
from asyncrl.training.ranks.layout import RankEnvironment


@pytest.mark.parametrize("local_rank", [0, 1])
def test_every_rank_refuses_gpus_that_torch_cannot_use(local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would train on its CPU, over gloo, while the engines wait for NCCL."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "installed_gpus", lambda: ("GPU-a", "GPU-b"))
    monkeypatch.setattr(rank, "driver_version", lambda: "535.104.05")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    environment = RankEnvironment(rank=local_rank, world_size=2, local_rank=local_rank, local_world_size=2)
    with pytest.raises(TrainerError, match=r"driver \(535\.104\.05\) shows 2 GPU\(s\) and torch can use 0.*580"):
        rank.join_process_groups(environment, HashStore(), 5.0)
    assert not dist.is_initialized()
