"""How the tensors of a Hugging Face checkpoint lie in Megatron's parameters. One table serves both directions.

Invariant: `to_hugging_face(kind, [to_megatron(kind, tensors, ...) of each rank])` is `tensors`, bit for bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.config.architecture import Architecture
from asyncrl.training.checkpoints.slices import Cut


class Kind(Enum):
    """How a parameter is made of checkpoint tensors and cut over tensor-parallel ranks."""

    REPLICATED = "the same on every rank"
    VOCABULARY = "rows cut, padded with zero rows to a multiple of the ranks"
    COLUMNS = "columns cut"
    GATED = "gate and up projection, each cut by rows, stacked per rank"
    QKV = "query, key and value projections, interleaved by key-value head, cut by key-value heads"

    @property
    def cut(self) -> int | None:
        """Dimension along which the ranks' parts of the parameter lie; None where they are the same."""
        return {Kind.REPLICATED: None, Kind.COLUMNS: 1}.get(self, 0)


@dataclass(frozen=True, slots=True)
class MappedParameter:
    """One Megatron parameter."""

    kind: Kind
    names: tuple[str, ...]
    """Checkpoint tensors that it is made of, in order."""

    @property
    def name(self) -> str:
        """Its name in checkpoints of the training, whatever modules the layers are built of."""
        return "+".join(self.names)


_MODEL = {
    "embedding.word_embeddings.weight": MappedParameter(Kind.VOCABULARY, ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": MappedParameter(Kind.REPLICATED, ("model.norm.weight",)),
    "output_layer.weight": MappedParameter(Kind.VOCABULARY, ("lm_head.weight",)),
}

_INPUT_NORM = MappedParameter(Kind.REPLICATED, ("input_layernorm.weight",))
_MLP_NORM = MappedParameter(Kind.REPLICATED, ("post_attention_layernorm.weight",))
_LAYER = {
    "input_layernorm.weight": _INPUT_NORM,
    "self_attention.linear_qkv.layer_norm_weight": _INPUT_NORM,  # Transformer Engine fuses it into the projection
    "pre_mlp_layernorm.weight": _MLP_NORM,
    "mlp.linear_fc1.layer_norm_weight": _MLP_NORM,  # likewise
    "self_attention.q_layernorm.weight": MappedParameter(Kind.REPLICATED, ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": MappedParameter(Kind.REPLICATED, ("self_attn.k_norm.weight",)),
    "self_attention.linear_qkv.weight": MappedParameter(Kind.QKV, tuple(f"self_attn.{p}_proj.weight" for p in "qkv")),
    "self_attention.linear_qkv.bias": MappedParameter(Kind.QKV, tuple(f"self_attn.{p}_proj.bias" for p in "qkv")),
    "self_attention.linear_proj.weight": MappedParameter(Kind.COLUMNS, ("self_attn.o_proj.weight",)),
    "mlp.linear_fc1.weight": MappedParameter(Kind.GATED, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": MappedParameter(Kind.COLUMNS, ("mlp.down_proj.weight",)),
}
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def entry(parameter: str) -> MappedParameter:
    """Looks up a Megatron parameter by its name; KeyError for one that no supported model has."""
    match = _LAYER_NAME.fullmatch(parameter)
    if match is None:
        return _MODEL[parameter]
    found = _LAYER[match[2]]
    return MappedParameter(found.kind, tuple(f"model.layers.{match[1]}.{name}" for name in found.names))


def tensor_shape(name: str, a: Architecture) -> tuple[int, ...]:
    """Shape that the checkpoint tensor `name` must have."""
    query, key_value = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (a.vocab_size, a.hidden_size),
        "lm_head.weight": (a.vocab_size, a.hidden_size),
        "norm.weight": (a.hidden_size,),
        "input_layernorm.weight": (a.hidden_size,),
        "post_attention_layernorm.weight": (a.hidden_size,),
        "q_norm.weight": (a.head_dim,),
        "k_norm.weight": (a.head_dim,),
        "q_proj.weight": (query, a.hidden_size),
        "k_proj.weight": (key_value, a.hidden_size),
        "v_proj.weight": (key_value, a.hidden_size),
        "q_proj.bias": (query,),
        "k_proj.bias": (key_value,),
        "v_proj.bias": (key_value,),
        "o_proj.weight": (a.hidden_size, query),
        "gate_proj.weight": (a.ffn_hidden_size, a.hidden_size),
        "up_proj.weight": (a.ffn_hidden_size, a.hidden_size),
        "down_proj.weight": (a.hidden_size, a.ffn_hidden_size),
    }
    return shapes[".".join(name.split(".")[-2:])]


def to_megatron(kind: Kind, tensors: Sequence[Tensor], a: Architecture, *, rank: int, ranks: int) -> Tensor:
    """The part of a parameter that tensor-parallel rank `rank` of `ranks` holds."""
    match kind:
        case Kind.REPLICATED:
            return tensors[0]
        case Kind.VOCABULARY:
            missing = -tensors[0].shape[0] % ranks
            return F.pad(tensors[0], (0, 0, 0, missing)).chunk(ranks)[rank]
        case Kind.COLUMNS:
            return tensors[0].chunk(ranks, dim=1)[rank]
        case Kind.GATED:
            return torch.cat([tensor.chunk(ranks)[rank] for tensor in tensors])
        case Kind.QKV:
            heads = [tensor.reshape(a.num_kv_heads, -1, *tensor.shape[1:]) for tensor in tensors]
            return torch.cat(heads, dim=1).chunk(ranks)[rank].flatten(0, 1)


def cut_of(kind: Kind, part: tuple[int, ...], a: Architecture, *, ranks: int) -> Cut | None:
    """How the ranks' parts of a parameter, each in the shape `part`, lie in the whole; None where they are the same."""
    rows, width = part[0], math.prod(part[1:])
    match kind:
        case Kind.REPLICATED:
            return None
        case Kind.VOCABULARY:
            return Cut(1, a.vocab_size, width)
        case Kind.COLUMNS:
            return Cut(rows, width * ranks, 1)
        case Kind.GATED:
            return Cut(2, rows // 2 * ranks, width)
        case Kind.QKV:
            return Cut(1, rows * ranks, width)


def to_hugging_face(kind: Kind, shards: Sequence[Tensor], a: Architecture) -> tuple[Tensor, ...]:
    """The checkpoint tensors of a parameter from the parts of all ranks, each contiguous and free of padding."""
    match kind:
        case Kind.REPLICATED:
            return (shards[0],)
        case Kind.VOCABULARY:
            return (torch.cat(list(shards))[: a.vocab_size],)
        case Kind.COLUMNS:
            return (torch.cat(list(shards), dim=1),)
        case Kind.GATED:
            halves = [shard.chunk(2) for shard in shards]
            return (torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves]))
        case Kind.QKV:
            packed = torch.cat(list(shards))
            grouped = packed.reshape(a.num_kv_heads, -1, *packed.shape[1:])
            queries = a.num_heads // a.num_kv_heads * a.head_dim
            return tuple(
                part.flatten(0, 1).contiguous()
                for part in torch.split(grouped, [queries, a.head_dim, a.head_dim], dim=1)
            )
