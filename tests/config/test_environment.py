"""Ranks and engines get the same NCCL, and each what it needs of CUDA."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.config.environment import HEARTBEAT, OF_RANKS, rank_settings
from asyncrl.config.layout import ProcessLayout
from asyncrl.config.machine import Machine
from asyncrl.config.placement.rules import plan_layout
from asyncrl.config.reading.loaded import LoadedConfig
from asyncrl.host.environment import host_environment
from asyncrl.inference.sglang.launch import engine_environment

APART = Machine(world_size=2, local_world_size=2, gpus=("0", "1", "2", "3"))
NCCL = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")


def job(gpus: int = 4, **engine: Any) -> tuple[Config, ProcessLayout]:
    config = Config.model_validate({"engine": engine})
    machine = Machine(world_size=2 if gpus else 1, local_world_size=2 if gpus else 1, gpus=APART.gpus[:gpus])
    return config, plan_layout(config, machine)


def both(environ: dict[str, str], config: Config, layout: ProcessLayout) -> tuple[dict[str, str], dict[str, str]]:
    """The environments of a rank and of an engine of this job, which was started with `environ`."""
    rank = environ | rank_settings(environ, layout, config)
    added = engine_environment(config.engine, layout.engines[0], rank, threads=None, cores=(0,), scratch=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", rank)
        return rank, host_environment() | added


@pytest.mark.parametrize(
    ("given", "server_args", "expected"),
    [
        ({}, {}, ("0", "0")),
        ({"NCCL_CUMEM_ENABLE": "1"}, {}, ("1", "0")),
        ({"NCCL_NVLS_ENABLE": "2", "NCCL_CUMEM_ENABLE": "0"}, {}, ("0", "2")),
        ({}, {"enable_nccl_nvls": True}, ("0", "1")),
        ({"NCCL_CUMEM_ENABLE": "0"}, {"enable_symm_mem": True}, ("1", "1")),
    ],
)
def test_a_rank_and_an_engine_have_the_same_nccl(
    given: dict[str, str], server_args: dict[str, bool], expected: tuple[str, str]
) -> None:
    rank, engine = both(given, *job(server_args=server_args))
    assert tuple(rank[name] for name in NCCL) == expected
    assert tuple(engine[name] for name in NCCL) == expected


@pytest.mark.parametrize(
    ("settings", "gpus", "broadcast"),
    [
        ({"engine": {"colocate": True}}, 2, False),
        ({"weights": {"transport": "disk"}}, 4, False),
        ({"debug": {"train_only": True}}, 2, False),
        ({"engine": {"external": ["http://10.0.0.9:30000"]}}, 2, True),
        ({"engine": {"external": ["http://10.0.0.9:30000"]}, "weights": {"transport": "disk"}}, 2, False),
    ],
)
def test_ranks_keep_nccls_own_settings_where_nothing_is_broadcast(
    settings: dict[str, Any], gpus: int, broadcast: bool
) -> None:
    config = Config.model_validate(settings)
    layout = plan_layout(config, Machine(world_size=2, local_world_size=2, gpus=APART.gpus[:gpus]))
    added = rank_settings({}, layout, config)
    assert [name in added for name in NCCL] == [broadcast, broadcast]


def test_what_is_for_ranks_alone_reaches_no_engine() -> None:
    rank, engine = both({"PATH": "/bin"}, *job())
    assert rank["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert rank["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert engine.keys().isdisjoint({"CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", OF_RANKS})
    assert engine["PATH"] == "/bin"


@pytest.mark.parametrize(
    "given", [{"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}]
)
def test_what_the_user_says_of_the_allocator_stays(given: dict[str, str]) -> None:
    rank, engine = both(given, *job())
    assert given.items() <= rank.items() and given.items() <= engine.items()
    assert len(rank.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}) == 1


def test_no_segment_expands_where_engines_map_the_trainers_memory() -> None:
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    for environment in both(given, *job(gpus=2, colocate=True)):
        assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64", "the other options stay"
    rank, _ = both({}, *job(gpus=2, colocate=True))
    assert "PYTORCH_CUDA_ALLOC_CONF" not in rank


def test_an_engine_of_a_job_that_names_gpus_by_uuid_counts_them_as_the_driver_does() -> None:
    _, engine = both({"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb,GPU-cc,GPU-dd"}, *job())
    assert engine["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    _, engine = both({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, *job())
    assert "CUDA_DEVICE_ORDER" not in engine


@pytest.mark.parametrize(
    ("step_timeout_s", "given", "expected"), [(1800.0, None, 1860), (10.0, None, 480), (1800.0, "600", 600)]
)
def test_torch_ends_no_rank_before_the_deadline_of_a_command(
    step_timeout_s: float, given: str | None, expected: int
) -> None:
    config, layout = job()
    config = Config.model_validate({"train": {"step_timeout_s": step_timeout_s}})
    rank, engine = both({} if given is None else {HEARTBEAT: given}, config, layout)
    assert rank[HEARTBEAT] == str(expected)
    assert (HEARTBEAT in engine) == (given is not None)


def test_a_job_on_cpu_adds_only_what_megatron_looks_at_everywhere() -> None:
    config, layout = job(gpus=0)
    assert rank_settings({}, layout, config).keys() == {"CUDA_DEVICE_MAX_CONNECTIONS", OF_RANKS}


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_has_its_environment_before_it_imports_torch(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncrl import driver

    config, layout = job()
    machine = Machine(world_size=2, local_world_size=2, rank=rank, gpus=APART.gpus)
    found: dict[str, str] = {}

    def look(*_: object) -> int:
        found.update(os.environ)
        return 0

    monkeypatch.setattr(os, "environ", {"RANK": "0"})
    monkeypatch.setattr(driver, "prepare_rank", lambda: None)
    monkeypatch.setattr(driver, "raise_open_files", lambda: None)
    monkeypatch.setattr(driver, "load_config", lambda *_, **__: LoadedConfig(config, {}, machine, layout))
    monkeypatch.setattr(driver, "_drive", look)
    monkeypatch.setattr(driver, "_serve", look)
    assert driver.run_job(look, []) == 0
    assert rank_settings({}, layout, config).items() <= found.items()
