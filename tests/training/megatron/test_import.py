"""What importing Megatron brings into a rank."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from asyncrl.training.megatron import cpu_shim


@pytest.mark.parametrize("gpus", [False, True])
def test_a_rank_leaves_no_directories_of_wandb_since_megatron_finds_none(
    monkeypatch: pytest.MonkeyPatch, gpus: bool
) -> None:
    timers = importlib.import_module("megatron.core.timers")
    assert timers.wandb is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    with cpu_shim.quick_import(), pytest.raises(ImportError):
        importlib.import_module("wandb")


def test_packages_that_were_hidden_while_megatron_is_imported_are_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "wandb", ours)
    with cpu_shim.quick_import():
        assert sys.modules["wandb"] is None
    assert sys.modules["wandb"] is ours
