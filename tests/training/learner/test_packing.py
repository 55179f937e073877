"""Whatever comes in, every trained sample is computed exactly once."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.training.learner.collate import pack_tokens, trained_sequences
from asyncrl.training.learner.packing import MicroBatch, attention_runs, pack, plan_steps, split_evenly
from tests.training.batches import make_batch, split_samples

SAMPLES = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 9), st.booleans()), max_size=60)
LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(samples=SAMPLES, data_parallel=st.integers(1, 5), max_tokens=st.integers(1, 400), minibatches=st.integers(1, 6))
def test_every_trained_sample_is_counted_once_and_groups_stay_whole(
    samples: list[tuple[int, int, bool]], data_parallel: int, max_tokens: int, minibatches: int
) -> None:
    lengths, groups, trained = [s[0] for s in samples], [s[1] for s in samples], [s[2] for s in samples]
    plans = plan_steps(
        lengths, groups, trained, data_parallel=data_parallel, max_tokens=max_tokens, minibatches=minibatches
    )
    counted = Counter(i for plan in plans for i in plan.sequences)
    assert counted == Counter(i for i, keep in enumerate(trained) if keep)
    step_of: dict[int, int] = {}
    for step, plan in enumerate(plans):
        assert len(plan.ranks) == data_parallel
        for i in plan.sequences:
            assert step_of.setdefault(groups[i], step) == step
        for rank in plan.ranks:
            assert rank  # a rank without micro-batches would hang the others in the gradient reduction
            for micro_batch in rank:
                assert micro_batch.sequences
                assert len(micro_batch.sequences) == 1 or sum(lengths[i] for i in micro_batch.sequences) <= max_tokens
    assert len(plans) == min(minibatches, len({g for g, keep in zip(groups, trained, strict=True) if keep}))
    sizes = Counter(step_of.values())
    assert not sizes or max(sizes.values()) - min(sizes.values()) <= 1  # groups are spread evenly over the steps


@given(lengths=LENGTHS, parts=st.integers(1, 6))
def test_ranks_differ_by_at_most_one_sample_of_tokens(lengths: list[int], parts: int) -> None:
    shards = split_evenly(range(len(lengths)), lengths, parts)
    loads = [sum(lengths[i] for i in shard) for shard in shards]
    assert max(loads) - min(loads) <= max(lengths)


def test_micro_batches_hold_samples_of_like_length() -> None:
    assert pack(range(6), [10, 50, 11, 49, 12, 51], 110) == (
        MicroBatch((5, 1)),
        MicroBatch((3, 4, 2, 0)),
    )


def test_a_rank_without_samples_gets_an_uncounted_one() -> None:
    (plan,) = plan_steps([9, 5], [0, 0], [True, True], data_parallel=3, max_tokens=100)
    assert sorted(rank[0].counted for rank in plan.ranks) == [False, True, True]
    assert sorted(plan.sequences) == [0, 1]


@given(lengths=LENGTHS)
def test_attention_runs_cover_the_tokens_in_order_and_waste_little(lengths: list[int]) -> None:
    runs = attention_runs(lengths)
    assert [n for run in runs for n in run.lengths] == lengths
    assert [run.start for run in runs] == [sum(r.tokens for r in runs[:i]) for i in range(len(runs))]
    for run in runs:
        assert run.longest * len(run.lengths) - run.tokens <= 0.25 * run.tokens + 256


def test_many_short_sequences_are_one_run() -> None:
    assert len(attention_runs([40, 39, 38] * 80)) == 1
    assert len(attention_runs(sorted([20 + i % 21 for i in range(256)], reverse=True))) <= 3


@given(lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12), order=st.randoms())
def test_packed_rows_point_at_the_token_before_each_response_token(
    lengths: list[tuple[int, int]], order: object
) -> None:
    batch = make_batch(lengths)
    chosen = list(range(len(lengths)))
    order.shuffle(chosen)  # type: ignore[attr-defined]
    packed = pack_tokens(batch, MicroBatch(tuple(chosen)))
    samples = split_samples(batch)
    assert packed.tokens.tolist() == [t for i in chosen for t in samples[i][0].tolist()]
    assert packed.positions.tolist() == [p for i in chosen for p in range(sum(lengths[i]))]
    assert packed.targets.tolist() == [t for i in chosen for t in samples[i][0][samples[i][1] :].tolist()]
    assert torch.equal(packed.tokens[packed.rows + 1], packed.targets)
    assert packed.sequences.tolist() == [i for i in chosen for _ in range(lengths[i][1])]
    starts = [sum(p + r for p, r in lengths[:i]) + lengths[i][0] for i in range(len(lengths))]
    assert packed.places.tolist() == [starts[i] + k for i in chosen for k in range(lengths[i][1])]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12), ranks=st.integers(1, 8)
)
def test_padding_fills_up_to_a_multiple_of_the_ranks_and_moves_no_token(
    lengths: list[tuple[int, int]], ranks: int
) -> None:
    packed = pack_tokens(make_batch(lengths), MicroBatch(tuple(range(len(lengths)))))
    padded = packed.padded(ranks)
    added = len(padded.tokens) - len(packed.tokens)
    assert 0 <= added < ranks and len(padded.tokens) % ranks == 0
    assert sum(padded.lengths) == len(padded.tokens) == len(padded.positions)
    assert padded.lengths[: len(lengths)] == packed.lengths
    assert torch.equal(padded.tokens[: len(packed.tokens)], packed.tokens)
    assert torch.equal(padded.positions[: len(packed.tokens)], packed.positions)
    assert not padded.tokens[len(packed.tokens) :].any() and torch.equal(padded.rows, packed.rows)


def test_a_sample_is_trained_when_the_mask_keeps_one_of_its_tokens() -> None:
    mask = torch.tensor([False, False, False, True])
    assert trained_sequences(make_batch([(2, 2), (1, 0), (3, 2)], loss_mask=mask)) == [False, False, True]
