"""The memory estimate against what torch allocates: parameters, gradients, Adam's state, and activations on the CPU.

`python -m tests.training.megatron.test_memory_estimate` prints the table of docs/gpu.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state

from asyncrl.config import Config
from asyncrl.config.architecture import Architecture, read_architecture
from asyncrl.config.layout import DType
from asyncrl.config.memory.activations import Recompute, token_activations
from asyncrl.config.memory.shapes import RankShape
from asyncrl.config.memory.trainer import trainer_memory
from asyncrl.training.learner.logprobs import token_logprobs
from asyncrl.training.megatron.kernels import Attention
from asyncrl.training.megatron.model import PolicyModel, transformer_config
from asyncrl.training.megatron.modules import packed_sequences
from asyncrl.training.megatron.optimizer import Optimizer
from asyncrl.training.megatron.parallel import join
from asyncrl.training.ranks.layout import RankLayout
from tests.training.forked_ranks import run_ranks
from tests.training.megatron.allocations import Allocations, storage_bytes

MODELS = Path(__file__).parents[2] / "config" / "models"
DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SMALL = Architecture(
    model_type="qwen3",
    num_layers=2,
    hidden_size=128,
    ffn_hidden_size=384,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=1000,
    max_positions=4096,
    norm_eps=1e-6,
    rope_theta=1e6,
    rope_llama3_factor=None,
    tied_embeddings=False,
    qkv_bias=False,
    qk_norm=True,
)
LARGER = replace(
    SMALL, num_layers=4, hidden_size=256, ffn_hidden_size=768, num_heads=8, num_kv_heads=4, vocab_size=2000
)
QWEN2 = replace(SMALL, model_type="qwen2", qkv_bias=True, qk_norm=False, tied_embeddings=True)
SHAPES = {"small": SMALL, "larger": LARGER, "qwen2": QWEN2}
RECOMPUTE: tuple[Recompute, ...] = ("none", "mlp", "full")
TOKENS = 256


@dataclass(frozen=True)
class Compared:
    """Bytes of one rank."""

    estimated: int
    measured: int

    @property
    def error(self) -> float:
        """Of the estimate, relative."""
        return self.estimated / self.measured - 1


def made(layout: RankLayout, shape: Architecture, dtype: DType, recompute: str) -> tuple[Optimizer, Config]:
    """A trainable model with small random weights."""
    config = Config.model_validate({"train": {"tensor_parallel": layout.tensor_parallel, "recompute": recompute}})
    join(config, layout)
    described = transformer_config(
        shape, dtype=DTYPES[dtype], tensor_parallel=layout.tensor_parallel, recompute=config.train.recompute
    )
    model = PolicyModel(shape, described).to(DTYPES[dtype])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return Optimizer(model, described, config.train, data_parallel=layout.data_parallel), config


def static(layout: RankLayout) -> dict[tuple[str, str], Compared]:
    """Weights, gradients and Adam's state after one step, in each dtype."""
    return {(dtype, what): part for dtype in DTYPES for what, part in _static(layout, LARGER, dtype).items()}


def _static(layout: RankLayout, shape: Architecture, dtype: DType) -> dict[str, Compared]:
    optimizer, config = made(layout, shape, dtype, "none")
    optimizer.zero_grad()
    optimizer.step(1e-3, optimizer.grad_norm())
    adams = list(optimizer._adams())
    state = [value for adam in adams for values in adam.state.values() for value in values.values()]
    if dtype == "bfloat16":
        state += [parameter for adam in adams for group in adam.param_groups for parameter in group["params"]]
    expected = trainer_memory(config, shape, dtype=dtype, device="cpu", data_parallel=layout.data_parallel)
    buffers = optimizer.module.buffers
    return {
        "weights": Compared(expected.weights, storage_bytes(optimizer.module.parameters())),
        "gradients": Compared(expected.gradients, storage_bytes(buffer.grad_data for buffer in buffers)),
        "optimizer": Compared(expected.optimizer, storage_bytes(state)),
    }


def steps(layout: RankLayout, shapes: Mapping[str, Architecture]) -> dict[tuple[str, ...], Compared]:
    """Activations of a step by shape, dtype and what is recomputed."""
    return {
        (name, dtype, recompute, what): part
        for name, shape in shapes.items()
        for dtype in DTYPES
        for recompute in RECOMPUTE
        for what, part in _step(layout, shape, dtype, recompute, TOKENS).items()
    }


def _step(
    layout: RankLayout, shape: Architecture, dtype: DType, recompute: Recompute, tokens: int
) -> dict[str, Compared]:
    """What autograd keeps after the forward pass of two sequences, and what is alive at most until the gradients are
    there. Every token has logits."""
    optimizer, _ = made(layout, shape, dtype, recompute)
    ids, positions = torch.arange(tokens) % 1000, torch.arange(tokens) % (tokens // 2)
    optimizer.zero_grad()
    with Allocations() as allocations:
        sequences = packed_sequences([tokens // 2] * 2, torch.device("cpu"), Attention.PADDED)
        logits = optimizer.module(ids[None], positions[None], sequences, torch.arange(tokens))
        kept = allocations.saved_bytes
        logprobs, _ = token_logprobs(
            logits,
            ids,
            temperature=1.0,
            vocab_size=shape.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        del logits
        logprobs.sum().backward()
    per_token = token_activations(
        RankShape(shape, layout.tensor_parallel), dtype=dtype, device="cpu", recompute=recompute
    )
    return {
        "kept": Compared(tokens * per_token.kept, kept),
        "peak": Compared(sum(per_token.peak(tokens)), allocations.peak_bytes),
    }


def meta_parameters(layout: RankLayout, models: list[Architecture]) -> list[Compared]:
    """Parameters of whole models, which take no memory."""
    join(Config.model_validate({"train": {"tensor_parallel": layout.tensor_parallel}}), layout)
    compared = []
    for model in models:
        described = transformer_config(model, dtype=torch.bfloat16, tensor_parallel=layout.tensor_parallel)
        with torch.device("meta"):
            parameters = list(PolicyModel(model, described).parameters())
        measured = sum({id(parameter): parameter.numel() for parameter in parameters}.values())
        compared.append(Compared(RankShape(model, layout.tensor_parallel).parameters, measured))
    return compared


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_of_real_models_are_counted_to_the_last_one(ranks: int) -> None:
    models = [read_architecture(MODELS / name) for name in ("qwen3-0.6b", "qwen3-8b", "qwen3-32b")]
    for got in run_ranks(meta_parameters, [*models, QWEN2], world_size=ranks, tensor_parallel=ranks):
        assert [compared.estimated for compared in got] == [compared.measured for compared in got]


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(1, 1), (2, 1), (2, 2)])
def test_weights_gradients_and_adam_take_what_was_estimated(ranks: int, tensor_parallel: int) -> None:
    [got, *_] = run_ranks(static, world_size=ranks, tensor_parallel=tensor_parallel)
    assert {what: compared for what, compared in got.items() if abs(compared.error) > 0.05} == {}


@pytest.mark.parametrize(("ranks", "shapes"), [(1, {"larger": LARGER, "qwen2": QWEN2}), (2, {"small": SMALL})])
def test_activations_take_what_was_estimated(ranks: int, shapes: Mapping[str, Architecture]) -> None:
    [got, *_] = run_ranks(steps, shapes, world_size=ranks, tensor_parallel=ranks)
    assert {what: compared for what, compared in got.items() if abs(compared.error) > 0.1} == {}


def _print_table() -> None:
    print("| ranks | case | estimated MB | measured MB | error |\n|---|---|---|---|---|")
    for ranks, tensor_parallel, name in ((1, 1, "1"), (2, 1, "DP 2"), (2, 2, "TP 2")):
        got = run_ranks(static, world_size=ranks, tensor_parallel=tensor_parallel)[0]
        if ranks == tensor_parallel:
            got |= run_ranks(steps, SHAPES, world_size=ranks, tensor_parallel=tensor_parallel)[0]
        for case, compared in got.items():
            sizes = f"{compared.estimated / 1e6:.2f} | {compared.measured / 1e6:.2f} | {100 * compared.error:+.1f} %"
            print(f"| {name} | {', '.join(case)} | {sizes} |", flush=True)


if __name__ == "__main__":
    _print_table()
