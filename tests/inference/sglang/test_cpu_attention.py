"""The batched attention of engines on CPU gives what SGLang's own gives, sequence by sequence."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what SGLang imports for other machines
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from asyncrl.inference.sglang import cpu_attention

SIZE, CACHE, CONTEXT = 8, 4096, 600
lengths = st.lists(st.integers(1, 90), min_size=1, max_size=40)
heads = st.sampled_from([(6, 2), (4, 4), (8, 1)])


class Step:
    """One step of an engine over a cache of random numbers: where its requests' tokens lie, and what is asked."""

    def __init__(self, cached: list[int], new: list[int], heads: tuple[int, int], mode: Any, seed: int) -> None:
        draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        self.heads, self.shared = heads
        self.keys, self.values = (torch.randn(CACHE, self.shared, SIZE, generator=numbers) for _ in range(2))
        self.queries = torch.randn(sum(new), self.heads, SIZE, generator=numbers)
        rows = len(new) + 3
        self.slots_of = torch.full((rows, CONTEXT), 2**31 - 1, dtype=torch.int32)  # what nobody wrote points nowhere
        requests = draw.sample(range(rows), len(new))
        for row, before, count in zip(requests, cached, new, strict=True):
            self.slots_of[row, : before + count] = torch.tensor(draw.sample(range(CACHE), before + count))
        self.batch = SimpleNamespace(
            forward_mode=mode,
            encoder_lens=None,
            out_cache_loc=None,
            req_pool_indices=torch.tensor(requests),
            seq_lens=torch.tensor(cached) + torch.tensor(new),
            extend_prefix_lens=torch.tensor(cached),
            extend_seq_lens=torch.tensor(new),
        )

    def backend(self, kind: Any) -> Any:
        pools = SimpleNamespace(dtype=torch.float32, req_to_token=self.slots_of)
        backend = kind(SimpleNamespace(device="cpu", req_to_token_pool=pools, token_to_kv_pool=pools))
        backend.init_forward_metadata(self.batch)
        return backend

    def computed_by(self, kind: Any, **how: Any) -> torch.Tensor:
        backend, batch = self.backend(kind), self.batch
        output = torch.full_like(self.queries, float("nan"))
        places = (self.keys, self.values, self.slots_of, batch.req_pool_indices, batch.seq_lens)
        options = {"enable_gqa": self.heads != self.shared, "scaling": 0.3} | how
        if batch.forward_mode == ForwardMode.DECODE:
            run, more = backend._run_sdpa_forward_decode, (None,)
        else:
            run, more = backend._run_sdpa_forward_extend, (batch.extend_prefix_lens, batch.extend_seq_lens, None)
        done: torch.Tensor = run(self.queries, output, *places, *more, **options)
        return done


PLAIN = {"is_cross_attn": False, "sliding_window_size": None}


@given(lengths, heads, st.integers(0, 2**16))
def test_a_decoding_step_equals_one_call_for_each_sequence(
    cached: list[int], heads: tuple[int, int], seed: int
) -> None:
    step = Step([n - 1 for n in cached], [1] * len(cached), heads, ForwardMode.DECODE, seed)
    how = {"causal": False, **PLAIN}
    own, native = (step.computed_by(kind, **how) for kind in (cpu_attention.BatchedAttention, TorchNativeAttnBackend))
    torch.testing.assert_close(own, native, atol=2e-6, rtol=1e-5)


@given(st.lists(st.tuples(st.sampled_from([0, 1, 7, 40]), st.integers(1, 40)), min_size=1, max_size=20), heads)
def test_a_prefill_equals_one_call_for_each_sequence(shapes: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    cached, new = [before for before, _ in shapes], [count for _, count in shapes]
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        step, how = Step(cached, new, heads, mode, 5), {"causal": True, **PLAIN}
        kinds = (cpu_attention.BatchedAttention, TorchNativeAttnBackend)
        own, native = (step.computed_by(kind, **how) for kind in kinds)
        torch.testing.assert_close(own, native, atol=2e-6, rtol=1e-5)


def test_what_is_no_plain_causal_attention_is_left_to_sglang() -> None:
    step = Step([30, 3], [1, 1], (6, 2), ForwardMode.DECODE, 0)
    how = {"causal": False, "is_cross_attn": False, "sliding_window_size": 4}
    own, native = (step.computed_by(kind, **how) for kind in (cpu_attention.BatchedAttention, TorchNativeAttnBackend))
    assert torch.equal(own, native)
    assert not torch.allclose(own, step.computed_by(TorchNativeAttnBackend, causal=False, **PLAIN))


@given(st.lists(st.integers(1, 20_000), max_size=300))
def test_calls_are_few_padded_little_and_bounded(lengths: list[int]) -> None:
    groups = cpu_attention.groups_of_similar(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[index] for index in group)
        assert all(lengths[index] >= longest * 0.8 for index in group)
        assert len(group) == 1 or len(group) * longest <= 16_384


def test_equally_long_sequences_share_one_call() -> None:
    assert len(cpu_attention.groups_of_similar([12] * 128)) == 1


def test_sglang_finds_it_under_the_name_that_the_platform_chose() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from asyncrl.inference.sglang.sglang_cpu import AnyCpuPlatform

    platform = AnyCpuPlatform()
    platform.init_backend()
    assert ATTENTION_BACKENDS[platform.get_default_attention_backend()] is cpu_attention.BatchedAttention
