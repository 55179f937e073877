"""A layout for GPUs that torch cannot use is refused, and does not train on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from asyncrl.config.machine import Machine
from asyncrl.errors import TrainerError
from asyncrl.training.ranks import device, rank
from asyncrl.training.ranks.device import check_device
from asyncrl.training.ranks.layout import RankEnvironment


@pytest.fixture
def torch_sees(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(device, "driver_version", lambda: "535.104")
    yield


@pytest.mark.parametrize(
    ("planned", "torch_sees", "told"),
    [
        (0, 0, None),
        (8, 8, None),
        (
            8,
            0,
            r"\(535\.104\) shows 8 GPUs, and torch can use 0: .*needs driver 580 or newer.*asyncrl doctor",
        ),
        (8, 7, "torch can use 7"),
        (0, 8, "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
    ],
    indirect=["torch_sees"],
)
def test_torch_must_see_what_the_layout_has(planned: int, torch_sees: None, told: str | None) -> None:
    machine = Machine(gpus=tuple(map(str, range(planned))))
    if told is None:
        check_device(machine)
    else:
        with pytest.raises(TrainerError, match=told):
            check_device(machine)


def test_a_rank_asks_before_it_joins_any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "detect", lambda: Machine(gpus=("0",)))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("it joined a group"))
    with pytest.raises(TrainerError, match="shows 1 GPUs"):
        rank.join_process_groups(RankEnvironment(), dist.HashStore(), 5.0)
