"""Which kernels a machine computes with, and that what is missing or broken is told and done without."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from asyncrl.training.megatron import cpu_shim, kernels, model, modules
from asyncrl.training.megatron.kernels import Attention, choose_attention
from asyncrl.training.megatron.modules import PackedAttention, packed_sequences

HOPPER, VOLTA = (9, 0), (7, 0)


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        (Attention.VARIABLE_LENGTH, {}),
        (Attention.VARIABLE_LENGTH, {"dtype": torch.float16, "head_dim": 64, "capability": (8, 0)}),
        (Attention.TRANSFORMER_ENGINE, {"transformer_engine": True}),
        (Attention.TRANSFORMER_ENGINE, {"transformer_engine": True, "capability": (10, 0)}),
        (Attention.VARIABLE_LENGTH, {"transformer_engine": True, "capability": (8, 0)}),
        (Attention.VARIABLE_LENGTH, {"transformer_engine": True, "capability": (12, 0)}),
        (Attention.VARIABLE_LENGTH, {"transformer_engine": True, "head_dim": 192}),
        (Attention.PADDED, {"transformer_engine": True, "dtype": torch.float32}),
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
        assert sequences.cu_seqlens_q_padded.tolist() == [0, 20]
    assert [bool(described[a].runs) for a in Attention] == [False, False, True]
    fused = packed_sequences(lengths, host, Attention.VARIABLE_LENGTH, fused_rope=True)
    assert fused.cu_seqlens_q_padded is None, "a fused rotary embedding reads the ends alone"


@pytest.mark.parametrize("attention", list(Attention))
def test_layers_of_transformer_engine_attend_with_torch_where_cudnn_does_not_take_the_model(
    attention: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = get_gpt_layer_local_spec(normalization="RMSNorm")
    monkeypatch.setattr(model, "uses_transformer_engine", lambda: True)
    monkeypatch.setattr(model, "get_gpt_layer_with_transformer_engine_spec", lambda qk_layernorm: theirs)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(model, "attention_of", lambda *_: attention)
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2)
    chosen = model.layer_spec(config).submodules.self_attention.submodules.core_attention
    assert (chosen is PackedAttention) == (attention is not Attention.TRANSFORMER_ENGINE)


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
    assert "does not load" in told["event"] and ".[gpu]" in told["fix"]
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


def test_megatron_finds_no_transformer_engine_on_a_machine_without_a_gpu(
    gpu_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with cpu_shim.quick_import(), pytest.raises(ImportError):  # its Adam would run on the CPU then, and fail
        import transformer_engine  # noqa: F401


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


def documented_attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, _: Tensor, longest: int, __: int, **options: Any
) -> Tensor:
    """What torch documents of `varlen_attn`, which has no kernel for a CPU: each sequence by itself."""
    assert options["window_size"] == (-1, 0) and ends.dtype == torch.int32 and longest == int(ends.diff().max())
    settings = {"is_causal": True, "scale": options["scale"], "enable_gqa": options["enable_gqa"]}
    parts = [
        F.scaled_dot_product_attention(*(t[start:end].transpose(0, 1)[None] for t in (query, key, value)), **settings)
        for start, end in itertools.pairwise(ends.tolist())
    ]
    return torch.cat([part[0].transpose(0, 1) for part in parts])


def test_attention_without_padding_computes_what_padded_runs_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "varlen_attn", documented_attention)
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2)
    attention = PackedAttention(config, softmax_scale=0.3)
    lengths = (400, 9, 7, 1)
    query, key, value = (torch.randn(sum(lengths), heads, 8, requires_grad=True) for heads in (4, 2, 2))
    results = []
    for kind in (Attention.PADDED, Attention.VARIABLE_LENGTH):
        sequences = packed_sequences(lengths, torch.device("cpu"), kind)
        out = attention(query, key, value, None, packed_seq_params=sequences)
        results.append((out, *torch.autograd.grad(out.square().sum(), (query, key, value))))
    for padded, packed in zip(*results, strict=True):
        assert torch.allclose(padded, packed, atol=1e-5)
