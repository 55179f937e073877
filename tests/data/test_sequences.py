"""Turns, sequences and samples, and the batch that they make."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.data.batch import RolloutBatch
from asyncrl.data.sample import Prompt, Sample, SampleGroup, TokenSequence, Turn, VersionSpan
from asyncrl.data.staleness import Bound
from asyncrl.errors import DataError, StalenessError
from asyncrl.training.learner.collate import check_batch, pack_tokens, trained_sequences
from asyncrl.training.learner.packing import MicroBatch


def turn(context: list[int], output: list[int], *versions: str) -> Turn:
    """Each of `versions` made one token; the last one also made all tokens after it."""
    ends = [*range(1, len(versions)), len(output)]
    spans = tuple(
        VersionSpan(version, start, end) for start, (version, end) in enumerate(zip(versions, ends, strict=True))
    )
    logprobs = -np.array(output, np.float32) / 10
    return Turn(np.array(context, np.int32), np.array(output, np.int32), logprobs, spans)


def conversation() -> Sample:
    """The example in asyncrl/data/sample.py, with a second sequence behind it."""
    first = TokenSequence((turn([7, 7, 7], [4, 5], "0.3"), turn([8, 8], [6, 9, 2], "0.3", "0.4")))
    second = TokenSequence((turn([7, 7, 1], [3, 2], "0.5"),))
    return Sample("g.000", "g", (first, second), "stop", "done", reward=1.0)


def single() -> Sample:
    return Sample.of_turn("g.001", "g", turn([7, 7, 7], [5, 2], "0.5"), finish_reason="length", text="no", reward=0.0)


def batch_of(*samples: Sample) -> RolloutBatch:
    return RolloutBatch.from_groups(5, [SampleGroup("g", Prompt("p", "", np.array([7, 7, 7], np.int32)), samples)], 1.0)


def test_a_sequence_counts_its_spans_over_all_of_its_tokens() -> None:
    first, _ = conversation().sequences
    assert len(first) == 10
    assert first.spans() == (VersionSpan("0.3", 3, 5), VersionSpan("0.3", 7, 8), VersionSpan("0.4", 8, 10))


def test_a_sample_of_several_turns_shows_a_reward_what_was_sampled_in_all_of_them() -> None:
    sample = conversation()
    assert sample.prompt_ids.tolist() == [7, 7, 7]
    assert sample.output_ids.tolist() == [4, 5, 6, 9, 2, 3, 2]
    assert sample.logprobs.tolist() == pytest.approx([-0.4, -0.5, -0.6, -0.9, -0.2, -0.3, -0.2])
    assert [(span.version, span.start, span.end) for span in sample.versions] == [
        *(("0.3", 0, 2), ("0.3", 2, 3), ("0.4", 3, 5), ("0.5", 5, 7)),
    ]


def test_a_sample_whose_generation_failed_has_no_tokens() -> None:
    sample = Sample("s", "g", (), "abort", "", failure="generation timeout")
    assert len(sample.prompt_ids) == len(sample.output_ids) == len(sample.logprobs) == len(sample.versions) == 0


def test_a_batch_lies_over_all_tokens_of_all_sequences() -> None:
    batch = batch_of(conversation(), single())
    assert batch.num_samples == 2 and batch.num_sequences == 3
    assert batch.sequence_lengths.tolist() == [10, 5, 5] and batch.sample_index.tolist() == [0, 0, 1]
    assert batch.tokens.tolist() == [7, 7, 7, 4, 5, 8, 8, 6, 9, 2, 7, 7, 1, 3, 2, 7, 7, 7, 5, 2]
    assert "".join("x" if made else "." for made in batch.sampled.tolist()) == "...xx..xxx...xx...xx"
    assert torch.equal(batch.loss_mask, batch.sampled) and batch.sampled_lengths.tolist() == [5, 2, 2]
    assert torch.equal(batch.logprobs, torch.where(batch.sampled, -batch.tokens / 10, 0.0))
    assert batch.token_samples.tolist() == [0] * 15 + [1] * 5 and batch.sequence_groups.tolist() == [0, 0, 0]
    assert batch.truncated.tolist() == [False, True]
    assert batch.versions[0][-1] == VersionSpan("0.4", 8, 10)


def test_a_batch_of_no_sample_is_empty() -> None:
    batch = batch_of()
    assert batch.num_samples == batch.num_sequences == len(batch.tokens) == 0 and batch.sampled_lengths.tolist() == []


def test_only_what_the_policy_sampled_is_predicted() -> None:
    batch = batch_of(conversation(), single())
    packed = pack_tokens(batch, MicroBatch((2, 0)))
    assert packed.lengths == (5, 10)
    assert packed.targets.tolist() == [5, 2, 4, 5, 6, 9, 2]
    assert packed.tokens[packed.rows].tolist() == [7, 5, 7, 4, 8, 6, 9]
    assert batch.tokens[packed.places].tolist() == packed.targets.tolist()
    assert packed.sequences.tolist() == [2, 2, 0, 0, 0, 0, 0]
    assert packed.positions.tolist() == [*range(5), *range(10)]


def test_a_sequence_without_a_trained_token_is_left_out() -> None:
    batch = batch_of(conversation(), single())
    batch.loss_mask[:10] = False
    assert trained_sequences(batch) == [False, True, True]


def test_the_oldest_turn_of_a_sample_decides_whether_it_is_too_stale() -> None:
    batch = batch_of(single(), conversation())  # batch 5, so weights of step 3 are two steps old
    Bound(2, optimizer_steps=1).check(batch)
    with pytest.raises(StalenessError, match=r"sample g\.000: tokens 3-5 were made by weights '0\.3'"):
        Bound(1, optimizer_steps=1).check(batch)


def test_what_would_train_on_nonsense_is_refused_by_name() -> None:
    for name, value, told in [
        ("sampled", torch.ones(20, dtype=torch.bool), r"sample g\.000 has an empty prompt"),
        ("loss_mask", torch.ones(20, dtype=torch.bool), r"loss_mask of sample g\.000 keeps a token"),
        ("logprobs", torch.zeros(19), "20 tokens, but 19 entries of logprobs"),
        ("columns", {"advantages": torch.zeros(3)}, "20 tokens, but 3 entries of advantages"),
        ("sample_index", torch.tensor([0, 0, 2]), "sample_index does not name one of the 2 samples"),
        ("sequence_lengths", torch.tensor([10, 5, 6]), "sequence lengths do not add up to the 20 tokens"),
    ]:
        batch = batch_of(conversation(), single())
        object.__setattr__(batch, name, value)
        with pytest.raises(DataError, match=told):
            check_batch(batch, vocab_size=10)
