"""Which kernels a machine computes with, and that what is missing or broken is told and done without."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import layers

from asyncrl.training.megatron import kernels
from asyncrl.training.megatron.kernels import Attention, choose_attention
from asyncrl.training.megatron.modules import packed_sequences

HOPPER, VOLTA = (9, 0), (7, 0)


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        (Attention.VARIABLE_LENGTH, {}),
        (Attention.VARIABLE_LENGTH, {"dtype": torch.float16, "head_dim": 64, "capability": (8, 0)}),
        (Attention.TRANSFORMER_ENGINE, {"transformer_engine": True}),
        (Attention.PADDED, {"capability": None}),
        (Attention.PADDED, {"capability": VOLTA}),
        (Attention.PADDED, {"dtype": torch.float32}),
        (Attention.PADDED, {"head_dim": 12}),
        (Attention.PADDED, {"head_dim": 256}),
    ],
)
def test_attention_does_without_padding_where_torchs_flash_attention_takes_the_model(
    expected: Attention, given: dict[str, Any]
) -> None:
    hopper = {"transformer_engine": False, "capability": HOPPER, "dtype": torch.bfloat16, "head_dim": 128}
    assert choose_attention(**{**hopper, **given}) is expected


def test_kernels_get_the_ends_of_sequences_and_padding_gets_runs() -> None:
    lengths, host = (9, 4, 7), torch.device("cpu")
    described = {attention: packed_sequences(lengths, host, attention) for attention in Attention}
    for sequences in described.values():
        assert sequences.cu_seqlens_q.tolist() == sequences.cu_seqlens_kv.tolist() == [0, 9, 13, 20]
        assert sequences.cu_seqlens_q.dtype == torch.int32 and sequences.max_seqlen_q == 9
    assert [bool(described[a].runs) for a in Attention] == [False, False, True]
    assert described[Attention.TRANSFORMER_ENGINE].cu_seqlens_q_padded is None, "its kernels read the ends alone"
    assert described[Attention.PADDED].cu_seqlens_q_padded.tolist() == [0, 20]


@pytest.fixture
def gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with a GPU and a package `transformer_engine`, whose part for torch is still to be written."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(transformer_engine, "HAVE_TE", False)
    yield package
    for module in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules.pop(module, None)


@pytest.mark.parametrize(
    "fault", ["raise OSError('libcudnn_graph.so.9: cannot open shared object file')", "import absent_part"]
)
def test_a_transformer_engine_that_does_not_load_is_told_and_seems_absent(gpu_machine: Path, fault: str) -> None:
    (gpu_machine / "pytorch.py").write_text(fault)
    with structlog.testing.capture_logs() as logs:
        kernels.check_transformer_engine()
        kernels.tell_unused_transformer_engine()
    [told] = logs
    assert "does not load" in told["event"] and "asyncrl[gpu]" in told["fix"]
    assert any(word in told["reason"] for word in ("libcudnn_graph", "absent_part"))
    with pytest.raises(ImportError):  # Megatron looks for it so, and takes an ImportError for an absent package
        import transformer_engine  # noqa: F401
    assert not kernels.uses_transformer_engine()


def test_a_transformer_engine_of_a_version_that_megatron_cannot_use_is_told(gpu_machine: Path) -> None:
    (gpu_machine / "pytorch.py").write_text("")  # without the modules that Megatron imports from it
    with structlog.testing.capture_logs() as logs:
        kernels.check_transformer_engine()
        kernels.tell_unused_transformer_engine()
    assert [told["event"] for told in logs] == [
        "Megatron cannot use the installed version of Transformer Engine: training goes on without it, slower"
    ]


def test_nothing_is_told_where_no_transformer_engine_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with structlog.testing.capture_logs() as logs:
        kernels.check_transformer_engine()
        kernels.tell_unused_transformer_engine()
    assert not logs


def test_gradients_are_accumulated_in_the_matrix_product_where_megatron_found_its_extension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = []
    for gpu in (False, True):
        for extension in (False, True):
            monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
            monkeypatch.setattr(layers, "_grad_accum_fusion_available", extension)
            answers.append(kernels.fuses_gradient_accumulation())
    assert answers == [False, False, False, True]
