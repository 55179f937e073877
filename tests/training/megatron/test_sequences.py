"""A sample of two sequences, one of them a conversation of two turns, trains as the same tokens do one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.data.batch import RolloutBatch
from asyncrl.data.sample import Prompt, Sample, SampleGroup, TokenSequence, Turn
from asyncrl.training.ranks.layout import RankLayout
from tests.training.forked_ranks import run_ranks
from tests.training.megatron.test_training import assert_same_weights, trainer_of, weights_of

RANDOM = np.random.default_rng(7)
P, A, TOOL, B, Q, C, R, D = (RANDOM.integers(0, 101, size).astype(np.int32) for size in (4, 5, 3, 6, 7, 2, 5, 9))
PROMPT = Prompt("p", "", P)
STUB = "stub"
"""Samples that only set the baseline of their group; nothing in them trains."""


def turn(context: list[np.ndarray], output: np.ndarray) -> Turn:
    return Turn(np.concatenate(context), output, np.full(len(output), -4.0, np.float32), ())


def sample(name: str, reward: float, *sequences: tuple[Turn, ...]) -> Sample:
    return Sample(name, name, tuple(map(TokenSequence, sequences)), "stop", "", reward)


def batch_of(*groups: tuple[Sample, ...]) -> RolloutBatch:
    made = [SampleGroup(str(number), PROMPT, samples) for number, samples in enumerate(groups)]
    batch = RolloutBatch.from_groups(0, made, temperature=0.8)
    stubs = torch.tensor([name == STUB for name in batch.sample_ids])
    return replace(batch, loss_mask=batch.loss_mask & ~stubs[batch.token_samples])


def conversation() -> RolloutBatch:
    """Sample s has a conversation of two turns and another sequence, under one reward; sample t a single answer."""
    s = sample("s", 1.0, (turn([P], A), turn([TOOL], B)), (turn([Q], C),))
    return batch_of((s, sample("t", 0.0, (turn([R], D),))))


def one_by_one() -> RolloutBatch:
    """Each answer a sample of its own behind all that was read before it, with the advantage that it has there."""
    pairs = [(1.0, turn([P], A)), (1.0, turn([P, A, TOOL], B)), (1.0, turn([Q], C)), (0.0, turn([R], D))]
    return batch_of(
        *(
            (sample(f"s{number}", reward, (made,)), sample(STUB, 1.0 - reward, (turn([P], A),)))
            for number, (reward, made) in enumerate(pairs)
        )
    )


def train(layout: RankLayout, path: Path, loss: str, batch: RolloutBatch) -> tuple[Any, Tensor, dict[str, Tensor]]:
    trainer = trainer_of(layout, path, algorithm=loss, weight_decay=0.0)
    before = trainer.logprobs(batch)
    return [trainer.train(batch) for _ in range(3)], before, weights_of(trainer)


@pytest.mark.parametrize("loss", ["grpo", "sft"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_conversation_trains_as_its_answers_do_one_by_one(model_directory: Any, loss: str, world_size: int) -> None:
    path, whole, parts = model_directory("qwen3-tied"), conversation(), one_by_one()
    (metrics, logprobs, weights), *_ = run_ranks(train, path, loss, whole, world_size=world_size)
    [(expected_metrics, expected_logprobs, expected_weights)] = run_ranks(train, path, loss, parts)

    assert whole.num_samples == 2 and whole.num_sequences == 3 and whole.sampled_lengths.tolist() == [11, 2, 9]
    assert torch.allclose(logprobs[whole.loss_mask], expected_logprobs[parts.loss_mask], atol=1e-5)
    for got, expected in zip(metrics, expected_metrics, strict=True):
        assert got["train/trained_tokens"] == expected["train/trained_tokens"] == 22
        for name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7), name
    assert_same_weights(weights, expected_weights, 2e-5)
