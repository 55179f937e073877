"""The memory model as arithmetic: it grows with every size, its parts add up, and a budget that it gives fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.config.architecture import Architecture, read_architecture
from asyncrl.config.layout import Device, DType
from asyncrl.config.machine import Machine
from asyncrl.config.memory.activations import Recompute, token_activations
from asyncrl.config.memory.engine import engine_memory
from asyncrl.config.memory.estimate import MOST_TOKENS, Estimator
from asyncrl.config.memory.needs import added
from asyncrl.config.memory.shapes import RankShape
from asyncrl.config.memory.table import memory_lines
from asyncrl.config.memory.trainer import trainer_memory
from asyncrl.config.placement.rules import plan_layout

MODELS = Path(__file__).parents[1] / "models"
QWEN_8B = read_architecture(MODELS / "qwen3-8b")
GB = 10**9

ARCHITECTURES = st.builds(
    lambda layers, head_dim, kv_heads, group, ffn, vocabulary, tied, qk_norm: Architecture(
        model_type="qwen3",
        num_layers=layers,
        hidden_size=head_dim * kv_heads * group,
        ffn_hidden_size=8 * ffn,
        num_heads=8 * kv_heads * group,
        num_kv_heads=8 * kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        max_positions=4096,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_llama3_factor=None,
        tied_embeddings=tied,
        qkv_bias=not qk_norm,
        qk_norm=qk_norm,
    ),
    layers=st.integers(1, 80),
    head_dim=st.sampled_from([16, 64, 128]),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 8),
    ffn=st.integers(1, 4000),
    vocabulary=st.integers(8, 200_000),
    tied=st.booleans(),
    qk_norm=st.booleans(),
)
PARTS = st.sampled_from([1, 2, 4, 8])
DTYPES: st.SearchStrategy[DType] = st.sampled_from(["float32", "bfloat16"])
DEVICES: st.SearchStrategy[Device] = st.sampled_from(["cpu", "cuda"])
MODES: st.SearchStrategy[Recompute] = st.sampled_from(["none", "mlp", "full"])
SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "num_heads", "num_kv_heads")


def estimator(
    argv: dict[str, dict[str, object]], machine: Machine, model: Architecture = QWEN_8B, gpu_bytes: int = 80 * GB
) -> Estimator:
    config = Config.model_validate(argv)
    return Estimator(config, plan_layout(config, machine), model, gpu_bytes)


def gpus(count: int, ranks: int) -> Machine:
    return Machine(world_size=ranks, local_world_size=ranks, gpus=tuple(map(str, range(count))), gpu_bytes=80 * GB)


@given(ARCHITECTURES, PARTS, DTYPES, DEVICES, MODES, st.sampled_from(SIZES), st.integers(1, 1 << 16))
def test_every_part_grows_with_every_size_of_the_model(
    model: Architecture, parts: int, dtype: DType, device: Device, recompute: Recompute, size: str, tokens: int
) -> None:
    factor = 2 if size in ("num_heads", "num_kv_heads") else 1
    larger = replace(model, **{size: getattr(model, size) * factor + (0 if factor > 1 else 8)})
    config = Config.model_validate({"train": {"tensor_parallel": parts, "recompute": recompute}})
    one, other = (trainer_memory(config, m, dtype=dtype, device=device, data_parallel=2) for m in (model, larger))
    assert one.weights <= other.weights
    assert one.optimizer <= other.optimizer
    assert sum(one.per_token.peak(tokens)) <= sum(other.per_token.peak(tokens))
    assert sum(one.at(tokens).values()) <= sum(other.at(tokens).values())
    assert sum(one.at(tokens).values()) <= sum(one.at(tokens + 1).values())


@given(ARCHITECTURES, DTYPES, DEVICES, MODES, st.integers(1, 1 << 16))
def test_more_ranks_and_more_recomputing_take_less(
    model: Architecture, dtype: DType, device: Device, recompute: Recompute, tokens: int
) -> None:
    needs = [
        sum(token_activations(RankShape(model, parts), dtype=dtype, device=device, recompute=recompute).peak(tokens))
        for parts in (1, 2, 4, 8)
    ]
    assert needs == sorted(needs, reverse=True)
    kept = [
        token_activations(RankShape(model), dtype=dtype, device=device, recompute=mode).kept
        for mode in ("none", "mlp", "full")
    ]
    assert kept == sorted(kept, reverse=True)


@given(ARCHITECTURES, PARTS, DTYPES, st.integers(8, 200), st.booleans(), st.integers(1, 1 << 15))
def test_parts_add_up_to_the_total(
    model: Architecture, parts: int, dtype: DType, gigabytes: int, colocate: bool, tokens: int
) -> None:
    settings = {
        "model": {"dtype": dtype},
        "train": {"tensor_parallel": parts},
        "engine": {"colocate": colocate, "tensor_parallel": parts},
    }
    job = estimator(settings, gpus(16, 8), model, gigabytes * GB).memory(tokens)
    for need in job.devices:
        assert need.total == sum(need.parts.values())
        assert all(size > 0 for size in need.parts.values())
        assert need.fits == (need.total <= (need.capacity or 0))
    trainer = estimator(settings, gpus(16, 8), model, gigabytes * GB).trainer
    assert trainer is not None
    assert added(trainer.static, {}) == trainer.static
    at = trainer.at(tokens)
    assert all(at[name] == size for name, size in trainer.static.items())


@given(st.integers(10, 300), PARTS, MODES, st.booleans())
def test_a_budget_that_is_found_fits_and_the_next_larger_does_not(
    gigabytes: int, parts: int, recompute: Recompute, colocate: bool
) -> None:
    settings = {"train": {"tensor_parallel": parts, "recompute": recompute}, "engine": {"colocate": colocate}}
    job = estimator(settings, gpus(16, 8), gpu_bytes=gigabytes * GB)
    most = job.largest_budget()
    assert most is not None

    def fits(tokens: int) -> bool:
        return job.memory(tokens).devices[0].fits

    assert most == 0 or fits(most)
    assert not fits(most + 256)
    assert job.budget(1) == max(1, min(most, MOST_TOKENS))
    assert job.budget(most + 5) == most + 5
    assert memory_lines(job.memory(job.budget(64)))


def test_on_a_cpu_the_budget_stays_and_a_set_one_is_taken_anywhere() -> None:
    assert estimator({}, Machine()).layout.device == "cpu"
    assert replace(estimator({}, Machine()), gpu_bytes=None).budget(64) == 8192
    asked = {"train": {"max_tokens_per_microbatch": 100}}
    assert estimator(asked, gpus(4, 2)).budget(64) == 100
    assert replace(estimator({}, gpus(4, 2)), gpu_bytes=None).budget(10_000) == 10_000


def test_the_state_of_adam_moves_to_the_host_and_is_counted_there() -> None:
    on_device = estimator({"train": {"tensor_parallel": 4}}, gpus(8, 4)).memory(4096)
    on_host = estimator({"train": {"tensor_parallel": 4, "optimizer_on_host": True}}, gpus(8, 4)).memory(4096)
    assert "optimizer" not in on_host.devices[0].parts
    moved = on_device.devices[0].parts["optimizer"]
    assert on_device.devices[0].total - on_host.devices[0].total == moved
    gradients = on_device.devices[0].parts["gradients"] * 4 // 3  # page-locked, in powers of two
    assert on_host.host["Adam's state and its gradients"] == 4 * (moved + gradients)


def test_adam_on_the_host_takes_all_weights_of_each_rank_while_it_starts() -> None:
    settings = {"train": {"optimizer_on_host": True}, "weights": {"keep_published": "never"}}
    host = [sum(estimator(settings, gpus(16, ranks)).memory(4096).host.values()) for ranks in (1, 8)]
    parameters = RankShape(QWEN_8B).parameters
    later, start = 12 + 4 * 4 / 3, 8 * (4 + 4 / 8)  # bytes a parameter
    assert host == [pytest.approx(size * parameters, rel=1e-3) for size in (later, start)]


def test_a_checkpoint_is_copied_in_float32_and_as_a_model() -> None:
    job = estimator({"train": {"tensor_parallel": 4}, "checkpoint": {"every": 5}}, gpus(8, 4))
    assert job.memory(4096).host["copy of a checkpoint"] == pytest.approx(14 * RankShape(QWEN_8B).parameters, rel=1e-3)


def test_an_engine_of_quantised_weights_is_left_out() -> None:
    job = estimator({"engine": {"server_args": {"quantization": "fp8"}}}, gpus(8, 4), gpu_bytes=16 * GB)
    assert job.engines == {} and [need.who for need in job.memory(64).devices] == ["rank 0..3"]


def test_host_memory_is_held_against_what_the_node_has() -> None:
    job = estimator({"train": {"tensor_parallel": 4, "optimizer_on_host": True}}, gpus(8, 4))
    needed = sum(job.memory(4096).host.values())
    assert needed == pytest.approx((12 + 4 * 4 / 3 + 2) * RankShape(QWEN_8B).parameters, rel=1e-3)
    assert replace(job, host_bytes=needed).memory(4096).host_fits
    assert not replace(job, host_bytes=needed - 1).memory(4096).host_fits


def test_shared_gpus_have_a_need_for_each_turn() -> None:
    memory = estimator({"train": {"tensor_parallel": 8}, "engine": {"colocate": True}}, gpus(8, 8)).memory(4096)
    assert [need.who for need in memory.devices] == [
        "rank 0..7, training",
        "handover of weights",
        "engine-0..7, serving",
        "start of the trainer",
    ]
    training, handover, serving, start = (need.parts for need in memory.devices)
    assert handover["weights"] == start["weights"] == training["weights"] + serving["weights"]
    assert "KV" not in training and "gradients" not in serving


def test_a_trainer_counts_on_less_of_a_gpu_that_it_shares_and_an_offloaded_engine_keeps_some() -> None:
    train = {"train": {"tensor_parallel": 4}}
    alone, shared = (estimator(train | {"engine": {"colocate": share}}, gpus(8, 4)) for share in (False, True))
    assert (alone.memory(64).devices[0].capacity, shared.memory(64).devices[0].capacity) == (76 * GB, 70.4 * GB)
    one, other = (job.memory(64).devices[0].parts["runtime"] for job in (alone, shared))
    assert other - one == 2.5 * 2**30
    for job, share in ((alone, "95%"), (shared, "88%")):
        assert f"trainer ranks can use {share} of theirs" in memory_lines(job.memory(64))[0]


@pytest.mark.parametrize(
    ("capacity", "asked", "fraction"), [(80 * GB, None, None), (80 * GB, 1000, None), (24 * GB, None, 0.9)]
)
def test_an_engine_has_the_kv_that_its_share_leaves(capacity: int, asked: int | None, fraction: float | None) -> None:
    memory = engine_memory(
        QWEN_8B,
        dtype="bfloat16",
        device="cuda",
        ranks=1,
        capacity=capacity,
        settings={"max_total_tokens": asked, "mem_fraction_static": fraction},
        colocated=False,
    )
    assert memory.parts.get("KV", 0) == max(0, memory.kv_tokens) * 147456  # 36 layers of 2 x 8 heads of 128, 2 bytes
    assert sum(memory.parts.values()) <= capacity
    assert (memory.kv_tokens == asked) == (asked is not None)


@pytest.mark.parametrize("nonsense", ["much", True, -1, None, [0.5]])
def test_server_arguments_that_are_no_numbers_are_left_to_their_own_check(nonsense: object) -> None:
    settings = {"mem_fraction_static": nonsense, "max_total_tokens": nonsense}
    given, plain = (
        engine_memory(
            QWEN_8B, dtype="bfloat16", device="cuda", ranks=1, capacity=80 * GB, settings=settings, colocated=True
        )
        for settings in (settings, {})
    )
    assert given == plain


def test_an_engine_too_large_for_its_gpu_has_no_room_for_kv() -> None:
    memory = engine_memory(
        QWEN_8B, dtype="bfloat16", device="cuda", ranks=1, capacity=16 * GB, settings={}, colocated=False
    )
    assert memory.kv_tokens < 0
