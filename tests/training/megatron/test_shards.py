"""The shards of any layout, read by any other one, are what that layout would have held."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.config.architecture import Architecture
from asyncrl.errors import CheckpointError
from asyncrl.training.checkpoints.manifest import SavedLayout
from asyncrl.training.checkpoints.saved_shards import SavedShards
from asyncrl.training.checkpoints.shard import Shard, Snapshot, write_snapshots
from asyncrl.training.checkpoints.slices import Parts, Piece, slices
from asyncrl.training.megatron.mapping import Kind, cut_of, entry, to_megatron
from asyncrl.training.megatron.shards import WEIGHT, Held, reader, shard_of
from asyncrl.training.ranks.layout import RankLayout

LAYER = "decoder.layers.0."
NAMES = {
    Kind.REPLICATED: f"{LAYER}input_layernorm.weight",
    Kind.VOCABULARY: "embedding.word_embeddings.weight",
    Kind.COLUMNS: f"{LAYER}self_attention.linear_proj.weight",
    Kind.GATED: f"{LAYER}mlp.linear_fc1.weight",
    Kind.QKV: f"{LAYER}self_attention.linear_qkv.weight",
}
RANKS = (1, 2, 3, 4, 6)
"""Tensor-parallel sizes; the models below have 12 key-value heads, so that each divides them."""


@dataclass
class Model:
    """The tensors of one layer and an embedding, no two elements alike, as any rank of any layout holds them."""

    architecture: Architecture

    def whole(self, kind: Kind) -> list[Tensor]:
        a = self.architecture
        attention = a.num_kv_heads * a.head_dim
        shapes = {
            Kind.REPLICATED: [(a.hidden_size,)],
            Kind.VOCABULARY: [(a.vocab_size, a.hidden_size)],
            Kind.COLUMNS: [(a.hidden_size, a.num_heads * a.head_dim)],
            Kind.GATED: [(a.ffn_hidden_size, a.hidden_size)] * 2,
            Kind.QKV: [(a.num_heads * a.head_dim, a.hidden_size), *[(attention, a.hidden_size)] * 2],
        }[kind]
        tensors = []
        for i, shape in enumerate(shapes):
            size = torch.Size(shape).numel()
            tensors.append((1.0 + i * size + torch.arange(size)).view(shape))
        return tensors

    def part(self, kind: Kind, rank: int, ranks: int) -> Tensor:
        return to_megatron(kind, self.whole(kind), self.architecture, rank=rank, ranks=ranks)

    def shapes(self, rank: int, ranks: int) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self.part(kind, rank, ranks).shape) for kind, name in NAMES.items()}


@st.composite
def models(draw: st.DrawFn) -> Model:
    size = st.integers(1, 5)
    architecture = Architecture(
        model_type="qwen3", num_layers=1, hidden_size=draw(size), ffn_hidden_size=12 * draw(size),
        num_heads=12 * draw(st.integers(1, 3)), num_kv_heads=12, head_dim=draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(1, 40)), max_positions=8, norm_eps=1e-5, rope_theta=1.0, rope_llama3_factor=None,
        tied_embeddings=True, qkv_bias=False, qk_norm=False,
    )  # fmt: skip
    return Model(architecture)


@given(model=models(), kind=st.sampled_from(Kind), saved=st.sampled_from(RANKS), wanted=st.sampled_from(RANKS),
       data=st.data())  # fmt: skip
def test_slices_of_saved_parts_make_up_any_range_of_any_part(
    model: Model, kind: Kind, saved: int, wanted: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, wanted - 1))
    part = model.part(kind, rank, wanted)
    start = data.draw(st.integers(0, part.numel() - 1))
    stop = data.draw(st.integers(start + 1, part.numel()))
    there = [model.part(kind, r, saved).flatten() for r in range(saved)]
    cut = cut_of(kind, tuple(part.shape), model.architecture, ranks=wanted)
    found = list(
        slices(
            cut,
            saved=Parts(saved, len(there[0])),
            wanted=Parts(wanted, part.numel()),
            rank=rank,
            start=start,
            stop=stop,
        )
    )
    read = [torch.zeros(s.size) if s.rank is None else there[s.rank][s.start : s.start + s.size] for s in found]
    assert all(0 < s.size == len(r) for s, r in zip(found, read, strict=True))
    assert torch.equal(torch.cat(read), part.flatten()[start:stop])
    if saved == wanted:
        assert [s.rank for s in found] == [rank], "in its own layout a rank reads its own part, in one slice"


def pieces_of(size: int, copies: int, *, sharded: bool, odd: int) -> list[Piece | None]:
    """What each copy of the model holds of a part: a range each, or everything each. Ranges may be empty."""
    if not sharded:
        return [Piece(0, size, size)] * copies
    ends = [0, *sorted((odd * i * 7919) % (size + 1) for i in range(1, copies)), size]
    return [Piece(a, b, size) if a < b else None for a, b in pairwise(ends)]


def ranks_of(layout: SavedLayout) -> list[RankLayout]:
    return [RankLayout(rank, layout.ranks, rank, layout.tensor_parallel) for rank in range(layout.ranks)]


def held_by(model: Model, rank: RankLayout, *, sharded: bool, odd: int) -> list[Held]:
    """The state of a rank: its weights, and a moment that is their negative."""
    held = []
    for kind, name in NAMES.items():
        part = model.part(kind, rank.tensor_parallel_rank, rank.tensor_parallel).flatten()
        piece = pieces_of(len(part), rank.data_parallel, sharded=sharded, odd=odd)[rank.data_parallel_rank]
        if piece is not None:
            weights = part[piece.start : piece.stop]
            held.append(Held(name, piece, {WEIGHT: weights, "moment": -weights}))
    return held


def save(directory: Path, model: Model, layout: SavedLayout, *, sharded: bool = True, odd: int = 1) -> None:
    for rank in ranks_of(layout):
        shard = shard_of(held_by(model, rank, sharded=sharded, odd=odd), {})
        write_snapshots({"actor": Snapshot(shard)}, directory, rank)


def check_read(directory: Path, model: Model, saved: SavedLayout, ranks: Sequence[RankLayout], *, odd: int) -> None:
    for rank in ranks:
        shapes = model.shapes(rank.tensor_parallel_rank, rank.tensor_parallel)
        read = reader(SavedShards(directory, saved, rank, "actor"), shapes, model.architecture, rank)
        for held in held_by(model, rank, sharded=True, odd=odd):
            for kind, expected in held.states.items():
                assert torch.equal(read(held.name, kind, held.piece, torch.float32), expected), (rank, held.name)


def layouts() -> st.SearchStrategy[SavedLayout]:
    return st.builds(
        lambda copies, parts: SavedLayout(copies * parts, parts), st.integers(1, 3), st.sampled_from(RANKS[:4])
    )


@settings(max_examples=30, deadline=None)
@given(model=models(), saved=layouts(), wanted=layouts(), sharded=st.booleans(), odd=st.integers(1, 9))
def test_any_layout_reads_the_shards_of_any_other(
    model: Model, saved: SavedLayout, wanted: SavedLayout, sharded: bool, odd: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        save(Path(directory), model, saved, sharded=sharded, odd=odd)
        check_read(Path(directory), model, saved, ranks_of(wanted), odd=odd + 1)


MODEL = Model(
    Architecture(
        model_type="qwen3", num_layers=1, hidden_size=4, ffn_hidden_size=12, num_heads=12, num_kv_heads=12, head_dim=2,
        vocab_size=7, max_positions=8, norm_eps=1e-5, rope_theta=1.0, rope_llama3_factor=None,
        tied_embeddings=True, qkv_bias=False, qk_norm=False,
    )
)  # fmt: skip
FOUR, RANK = SavedLayout(4, 2), RankLayout(0, 1, 0, 1)
"""Written by two copies of two ranks, read by one rank."""
SHARD = "trainer/actor/rank-00002-of-00004"


def read_all(directory: Path, dtype: torch.dtype = torch.float32) -> None:
    shapes = MODEL.shapes(0, 1)
    read = reader(SavedShards(directory, FOUR, RANK, "actor"), shapes, MODEL.architecture, RANK)
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        read(name, "moment", Piece(0, size, size), dtype)


@pytest.mark.parametrize("kind", ["json", "safetensors"])
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_missing_or_damaged_shard_of_another_rank_is_named(tmp_path: Path, kind: str, damage: str) -> None:
    save(tmp_path, MODEL, FOUR)
    read_all(tmp_path)
    path = tmp_path / f"{SHARD}.{kind}"
    path.unlink() if damage == "missing" else path.write_bytes(b"\0" * 10)
    with pytest.raises(CheckpointError) as refused:
        read_all(tmp_path)
    assert str(refused.value).startswith(f"{path} cannot be read on rank 0: ")


def test_shards_that_lack_a_piece_or_a_moment_of_a_parameter_do_not_fit(tmp_path: Path) -> None:
    name = entry(NAMES[Kind.COLUMNS]).name
    save(tmp_path, MODEL, FOUR)
    with pytest.raises(CheckpointError, match=r"rank-00000-of-00004.safetensors does not fit: .* is torch.float32 \["):
        read_all(tmp_path, torch.float64)
    path = tmp_path / f"{SHARD}.json"
    facts = msgspec.json.decode(path.read_bytes())
    piece = facts["pieces"].pop(name)
    path.write_bytes(msgspec.json.encode(facts))
    with pytest.raises(
        CheckpointError, match=r"the shards of actor do not hold all of .*o_proj.weight of tensor-paral"
    ):
        read_all(tmp_path)
    facts["pieces"][name] = [piece[0] + 1, *piece[1:]]
    path.write_bytes(msgspec.json.encode(facts))
    with pytest.raises(CheckpointError, match=f"{SHARD}.safetensors does not fit: model.layers.0.self_attn.o_proj.wei"):
        read_all(tmp_path)
    for rank in ranks_of(FOUR):
        write_snapshots({"actor": Snapshot(Shard({}))}, tmp_path, rank)
    with pytest.raises(CheckpointError, match=f"does not fit: {entry(NAMES[Kind.REPLICATED]).name} is in none of"):
        read_all(tmp_path)
