from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asyncrl.config.sections.data import DataConfig
from asyncrl.config.sections.training import WarmupConfig
from asyncrl.data.supervised import SupervisedStream, load_supervised
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.errors import DataError, ModelError
from tests.tiny_policy import CHATML, write_policy


def load(path: Path, rows: list[dict[str, object]], context: int = 32, **model: object) -> SupervisedStream:
    path.mkdir(exist_ok=True)
    tokenizer = PolicyTokenizer.load(write_policy(path / "m", **model))  # type: ignore[arg-type]
    (path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    warmup = WarmupConfig(source=str(path / "sft.jsonl"), batch_size=3)
    return load_supervised(warmup, DataConfig(), tokenizer, context_length=context)


def test_a_batch_holds_prompt_response_and_end_token(tmp_path: Path) -> None:
    batch = load(tmp_path, [{"prompt": "1+1=", "response": "2"}]).next_batch(5)
    assert batch.rollout_id == 5 and batch.num_samples == 3
    assert batch.sequence_lengths.tolist() == [6] * 3 and batch.sampled_lengths.tolist() == [2] * 3
    assert batch.tokens.reshape(3, 6)[:, -1].tolist() == [2] * 3
    assert torch.equal(batch.rewards, torch.ones(3)) and torch.equal(batch.logprobs, torch.zeros(18))
    assert torch.equal(batch.loss_mask, batch.sampled) and not batch.truncated.any() and batch.temperature == 1.0
    assert len(set(batch.sample_ids)) == len(set(batch.group_ids)) == 3


def test_a_chat_is_taught_to_end_with_the_token_with_which_the_template_ends_turns(tmp_path: Path) -> None:
    row: dict[str, object] = {"prompt": "1", "response": "2"}
    template = CHATML.replace("<|im_end|>", "<|end|>").replace("<|im_start|>", "")
    chat = load(tmp_path / "chat", [row], chat_template=template, generation_config={"eos_token_id": 3})
    assert set(chat.next_batch(0).tokens.reshape(3, -1)[:, -1].tolist()) == {3}
    plain = load(tmp_path / "plain", [row], generation_config={"eos_token_id": 3})
    assert set(plain.next_batch(0).tokens.reshape(3, -1)[:, -1].tolist()) == {2}, "plain text ends with the tokenizer's"


def test_a_response_that_is_written_with_its_end_gets_no_second_one(tmp_path: Path) -> None:
    batch = load(tmp_path, [{"prompt": "1", "response": "2<eos>"}, {"prompt": "1", "response": ""}]).next_batch(0)
    assert sorted(set(batch.sampled_lengths.tolist())) == [1, 2]


def test_batches_go_through_all_examples_and_are_the_same_in_every_run(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": str(i), "response": "x" * (i + 1)} for i in range(6)]
    first, second = load(tmp_path, rows), load(tmp_path, rows)
    lengths = [tuple(first.next_batch(step).sampled_lengths.tolist()) for step in range(4)]
    assert lengths == [tuple(second.next_batch(step).sampled_lengths.tolist()) for step in range(4)]
    assert sorted(lengths[0] + lengths[1]) == sorted(lengths[2] + lengths[3]) == [2, 3, 4, 5, 6, 7]


def test_defects_of_warmup_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r'warmup: .*line 1: field "response" is missing \(found: prompt\); set warmup.response_key'
    ):
        load(tmp_path, [{"prompt": "1"}])
    with pytest.raises(DataError, match='field "response" must be a string, found int'):
        load(tmp_path, [{"prompt": "1", "response": 3}])
    with pytest.raises(DataError, match="1 example over 5 tokens, and no other"):
        load(tmp_path, [{"prompt": "1", "response": "x" * 5}], context=5)
    with pytest.raises(ModelError, match="names no end token"):
        load(tmp_path, [{"prompt": "1", "response": "x"}], vocab_size=2)
