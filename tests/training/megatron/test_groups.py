"""The process groups of trainer ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from asyncrl.config import Config
from asyncrl.training.megatron import parallel
from asyncrl.training.ranks import rank
from asyncrl.training.ranks.layout import RankEnvironment, RankLayout


@pytest.mark.parametrize("step_timeout_s", [1.0, 60.0, 90.0, 1800.0])
def test_the_driver_names_a_rank_that_hangs_before_any_collective_fails(
    step_timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: given.update(options))
    monkeypatch.setattr(rank, "CommandChannel", lambda *_: None)
    monkeypatch.setattr(rank, "meet", lambda *_: dist.HashStore())
    monkeypatch.setattr(parallel.parallel_state, "model_parallel_is_initialized", lambda: False)
    monkeypatch.setattr(
        parallel.parallel_state, "initialize_model_parallel", lambda *_, **options: given.update(options)
    )
    monkeypatch.setattr(parallel.tensor_parallel, "model_parallel_cuda_manual_seed", lambda *_, **__: None)
    config = Config.model_validate({"train": {"step_timeout_s": step_timeout_s}})
    rank.join_as_rank_zero(RankEnvironment(), config, None)
    parallel.join(config, RankLayout(rank=0, world_size=1, local_rank=0, tensor_parallel=1))
    for timeout in (given["timeout"], timedelta(minutes=given["distributed_timeout_minutes"])):
        assert timeout >= timedelta(seconds=step_timeout_s + 60)
