"""The memory estimate for CUDA against the kernels that torch chooses there: tensors only pretend to lie on a GPU.

`FakeTensorMode` runs shapes and dispatch without memory and without a device, so models have their real sizes. Only the
forward pass can pretend: the backward pass asks for a real device.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from asyncrl.config import Config
from asyncrl.config.architecture import read_architecture
from asyncrl.config.memory.activations import Recompute, token_activations
from asyncrl.config.memory.shapes import RankShape
from asyncrl.training.megatron import cpu_shim
from asyncrl.training.megatron.model import PolicyModel, transformer_config
from asyncrl.training.megatron.modules import PackedSequences
from asyncrl.training.megatron.parallel import join
from asyncrl.training.ranks.layout import RankLayout
from tests.training.forked_ranks import run_ranks
from tests.training.megatron.allocations import Allocations

MODELS = Path(__file__).parents[2] / "config" / "models"
TOKENS = 4096
LAYERS = 4


def kept_and_estimated(layout: RankLayout, name: str, modes: list[Recompute]) -> dict[str, tuple[int, int]]:
    """By what is recomputed: bytes that autograd keeps of TOKENS tokens, and their estimate."""
    join(Config(), layout)
    cpu_shim._thread.mode.__exit__(None, None, None)  # "cuda" means cuda here
    shape = replace(read_architecture(MODELS / name), num_layers=LAYERS)
    found = {}
    for mode in modes:
        with torch.device("meta"):
            model = PolicyModel(
                shape, transformer_config(shape, dtype=torch.bfloat16, tensor_parallel=1, recompute=mode)
            )
        with FakeTensorMode(allow_non_fake_inputs=True):
            pretend(model)
            ids, rows = (torch.empty(size, dtype=torch.int64, device="cuda") for size in ((1, TOKENS), (TOKENS,)))
            with Allocations() as allocations:
                model(ids, ids, two_sequences(), rows)
        per_token = token_activations(RankShape(shape), dtype="bfloat16", device="cuda", recompute=mode)
        found[mode] = allocations.saved_bytes, TOKENS * per_token.kept
    return found


def pretend(model: PolicyModel) -> None:
    """Gives a model on the meta device parameters that seem to lie on a GPU; inside of the mode."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = torch.nn.Parameter(torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda"))
                fake.__dict__.update(parameter.__dict__)
                module._parameters[name] = fake
    angles = model.rotary_pos_emb.inv_freq
    model.rotary_pos_emb.inv_freq = torch.empty(angles.shape, dtype=angles.dtype, device="cuda")


def two_sequences() -> PackedSequences:
    """As `packed_sequences` describes them to flash attention; what Megatron reads on the host is no tensor here."""
    ends, stretch = torch.empty(3, dtype=torch.int32, device="cuda"), numpy.array([0, TOKENS])
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=stretch,
        cu_seqlens_kv_padded=stretch,
        max_seqlen_q=TOKENS // 2,
        max_seqlen_kv=TOKENS // 2,
    )


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b"])
def test_the_tensors_that_cuda_kernels_keep_are_those_of_the_estimate(name: str) -> None:
    [found] = run_ranks(kept_and_estimated, name, ["none", "mlp", "full"])
    assert {mode: estimated / kept for mode, (kept, estimated) in found.items()} == {
        mode: pytest.approx(1, rel=0.02) for mode in found
    }
