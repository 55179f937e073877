"""Attention for engines on CPU: PyTorch's own kernel, called for many sequences at once.

SGLang's `torch_native` backend calls the kernel once for each sequence and layer. With small models that takes about
40 % of an engine's time. Here sequences of a batch that need (nearly) equally much memory share one call.

Invariants
- Decoding: sequences whose lengths lie within a quarter of each other share a call. Their keys are padded to the
  longest, and a mask of -inf gives padding a weight of exactly 0. So at most a fifth of a call is padding.
- Prefill: only sequences with the same number of cached and of new tokens share a call, so nothing is padded.
- A call of several sequences gathers at most `_MOST_SLOTS` keys, which bounds its memory.
- What is not plain causal self-attention (sliding windows, encoders) goes to `torch_native`.

Imported only inside an engine's processes (see `cpu_platform`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_LADDER = 1.25
_MOST_SLOTS = 16_384


@dataclass(frozen=True, slots=True)
class SharedCall:
    """Sequences of one call."""

    rows: Tensor
    """[n]: decoding: their places in the batch; prefill: [n, new tokens], the places of their queries."""
    slots: Tensor
    """[n * length]: the places of their keys and values in the cache, padded."""
    length: int
    """Keys of each sequence, padding included."""
    mask: Tensor | None
    """[n, 1, 1, length] or [1, 1, new tokens, length], added to the scores; None where no mask is needed."""
    causal: bool = False
    """Query i sees the keys up to i, and no mask says so."""


def groups_of_similar(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences that share a call when decoding, the longest first."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if groups:
            members, longest = len(groups[-1]), lengths[groups[-1][0]]
            if lengths[index] * _LADDER >= longest and (members + 1) * longest <= _MOST_SLOTS:
                groups[-1].append(index)
                continue
        groups.append([index])
    return groups


def decode_calls(slots_of: Tensor, requests: Tensor, lengths: Sequence[int], dtype: torch.dtype) -> list[SharedCall]:
    """The calls of a decoding step.

    Args:
        slots_of: [requests of the engine, longest context]: the place in the cache of each token of each request.
        requests: [n]: the row of `slots_of` of each sequence.
        lengths: keys of each sequence.
    """
    calls = []
    for group in groups_of_similar(lengths):
        rows, own = torch.tensor(group), torch.tensor([lengths[index] for index in group])
        longest = lengths[group[0]]
        slots = slots_of[requests[rows], :longest].to(torch.int64)
        padding = torch.arange(longest) >= own[:, None]
        mask = None
        if bool(padding.any()):
            slots = slots.masked_fill(padding, 0)  # beyond its end a row may name anything
            mask = torch.zeros(padding.shape, dtype=dtype).masked_fill_(padding, float("-inf"))[:, None, None]
        calls.append(SharedCall(rows, slots.reshape(-1), longest, mask))
    return calls


def extend_calls(
    slots_of: Tensor, requests: Tensor, cached: Sequence[int], new: Sequence[int], dtype: torch.dtype
) -> list[SharedCall]:
    """The calls of a prefill; `cached` and `new` are the tokens of each sequence before and in this step."""
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, shape in enumerate(zip(cached, new, strict=True)):
        alike[shape].append(index)
    begins = torch.tensor([0, *new]).cumsum(0)
    calls = []
    for (before, count), group in alike.items():
        length = before + count
        mask = None
        if count > 1 and before:
            ahead = torch.arange(length) > before + torch.arange(count)[:, None]
            mask = torch.zeros(ahead.shape, dtype=dtype).masked_fill_(ahead, float("-inf"))[None, None]
        together = max(_MOST_SLOTS // length, 1)
        for first in range(0, len(group), together):
            members = torch.tensor(group[first : first + together])
            rows = begins[members][:, None] + torch.arange(count)
            slots = slots_of[requests[members], :length].to(torch.int64)
            calls.append(SharedCall(rows, slots.reshape(-1), length, mask, causal=count > 1 and not before))
    return calls


def attend(query: Tensor, keys: Tensor, values: Tensor, call: SharedCall, output: Tensor, scale: float | None) -> None:
    """Writes the attention of one call into `output`.

    Args:
        query, output: [tokens, query heads, head size].
        keys, values: [cache slots, key heads, head size].
    """
    heads, size = query.shape[1:]
    shared = keys.shape[1]
    count = 1 if call.rows.dim() == 1 else call.rows.shape[1]
    sequences = call.rows.shape[0]

    def gathered(cache: Tensor) -> Tensor:  # [n, key heads, length, head size]
        taken = cache.index_select(0, call.slots).to(query.dtype)
        return taken.view(sequences, call.length, shared, -1).transpose(1, 2)

    rows = call.rows.reshape(-1)
    asked = query.index_select(0, rows)
    if count == 1:  # the query heads of a key head stand where several tokens would: nothing is repeated
        asked = asked.view(sequences, shared, heads // shared, size)
    else:
        asked = asked.view(sequences, count, heads, size).transpose(1, 2)
    found = scaled_dot_product_attention(
        asked,
        gathered(keys),
        gathered(values),
        attn_mask=call.mask,
        is_causal=call.causal,
        scale=scale,
        enable_gqa=count > 1 and heads != shared,
    )
    if count > 1:
        found = found.transpose(1, 2)
    output[rows] = found.reshape(sequences * count, heads, -1)


class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]  # sglang is untyped
    """See the module's docstring."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._calls: list[SharedCall] | None = None
        """Of the present step; None where `torch_native` computes it."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plans the calls of a step, which are the same in each layer."""
        super().init_forward_metadata(forward_batch)
        self._calls = None
        mode, slots_of = forward_batch.forward_mode, self.req_to_token_pool.req_to_token
        if forward_batch.encoder_lens is not None or self.use_sliding_window_kv_pool:
            return
        requests, dtype = forward_batch.req_pool_indices, self.token_to_kv_pool.dtype
        if mode.is_decode():
            self._calls = decode_calls(slots_of, requests, forward_batch.seq_lens.tolist(), dtype)
        elif mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
            cached, new = forward_batch.extend_prefix_lens.tolist(), forward_batch.extend_seq_lens.tolist()
            self._calls = extend_calls(slots_of, requests, cached, new, dtype)

    def _run_sdpa_forward_decode(self, query: Tensor, output: Tensor, *caches: Any, **how: Any) -> Tensor:
        return self._run(super()._run_sdpa_forward_decode, query, output, caches, how)

    def _run_sdpa_forward_extend(self, query: Tensor, output: Tensor, *caches: Any, **how: Any) -> Tensor:
        plain = how["causal"]
        return self._run(super()._run_sdpa_forward_extend, query, output, caches, how, plain=plain)

    def _run(
        self, native: Any, query: Tensor, output: Tensor, caches: Sequence[Any], how: dict[str, Any], plain: bool = True
    ) -> Tensor:
        if self._calls is None or not plain or how["is_cross_attn"] or how["sliding_window_size"] is not None:
            done: Tensor = native(query, output, *caches, **how)
            return done
        for call in self._calls:
            attend(query, caches[0], caches[1], call, output, how["scaling"])
        return output


def take_the_place_of_torch_native() -> None:
    """From now on SGLang's name `torch_native` stands for this backend: other code of SGLang asks for that name."""
    ATTENTION_BACKENDS["torch_native"] = BatchedAttention
