from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.errors import ConfigError, DataError, ModelError
from tests.tiny_policy import CHARACTERS, CHAT_TEMPLATE, CHATML, LLAMA, QWEN_THINKING, SPECIAL, write_policy


def test_end_tokens_of_tokenizer_generation_config_and_config_become_one_set(tmp_path: Path) -> None:
    write_policy(tmp_path, config={"eos_token_id": 0}, generation_config={"eos_token_id": [3, 2]})
    tokenizer = PolicyTokenizer.load(tmp_path)
    assert tokenizer.stop_token_ids == (0, 2, 3)
    assert tokenizer.eos_token_id == 2, "the tokenizer's own end token is what supervised responses end with"


def test_an_end_token_that_the_model_cannot_sample_is_left_out(tmp_path: Path) -> None:
    write_policy(tmp_path, generation_config={"eos_token_id": [2, 64, 99999]})
    assert PolicyTokenizer.load(tmp_path).stop_token_ids == (2,)


def test_encoding_keeps_every_character(tmp_path: Path) -> None:
    tokenizer = PolicyTokenizer.load(write_policy(tmp_path))
    text = "1+2=?\nab"
    (ids,) = tokenizer.encode([text], add_special_tokens=True)
    assert ids.dtype == np.int32 and len(ids) == len(text)
    assert ids.tolist() == [len(SPECIAL) + CHARACTERS.index(character) for character in text]


def test_text_that_begins_with_bos_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = PolicyTokenizer.load(write_policy(tmp_path, bos=True))
    once, twice, bare = (
        tokenizer.encode([text], add_special_tokens=added)[0].tolist()
        for text, added in (("<bos>ab", True), ("<bos><bos>ab", True), ("<bos>ab", False))
    )
    assert once == bare == [1, *tokenizer.encode(["ab"], add_special_tokens=False)[0]]
    assert twice == [1, *once], "the author's own second one stays"


def test_nothing_is_put_after_a_prompt(tmp_path: Path) -> None:
    tokenizer = PolicyTokenizer.load(write_policy(tmp_path, bos=True, eos=True))
    assert tokenizer.encode(["ab", ""], add_special_tokens=True)[0].tolist()[-1] != 2
    assert [ids.tolist()[:1] for ids in tokenizer.encode(["ab", ""], add_special_tokens=True)] == [[1], [1]]


def test_special_tokens_that_end_nothing_stay_in_the_text(tmp_path: Path) -> None:
    tokenizer = PolicyTokenizer.load(write_policy(tmp_path, special=("<think>", "</think>")))
    text = "<think> yes </think> 4"
    assert tokenizer.decode(tokenizer.encode([text], add_special_tokens=False)[0]) == text


@pytest.mark.parametrize(
    ("template", "turn_end"),
    [
        (CHATML, "<|im_end|>"),
        (LLAMA, "<|eot_id|>"),
        (QWEN_THINKING, "<|im_end|>"),
        (CHAT_TEMPLATE, "<eos>"),
        (None, "<eos>"),
    ],
)
def test_what_the_chat_template_ends_turns_with_ends_a_response(
    tmp_path: Path, template: str | None, turn_end: str
) -> None:
    special = ("<|im_end|>", "<|eot_id|>")
    tokenizer = PolicyTokenizer.load(write_policy(tmp_path, chat_template=template, special=special))
    end = tokenizer.token_of(turn_end)
    assert end is not None
    assert tokenizer.turn_end_id == end and tokenizer.eos_token_id == 2
    assert tokenizer.stop_token_ids == tuple(sorted({2, end}))


def test_an_id_outside_the_models_vocabulary_names_both_sizes(tmp_path: Path) -> None:
    tokenizer = PolicyTokenizer.load(write_policy(tmp_path, vocab_size=20))
    with pytest.raises(DataError, match=r"vocab_size is 20: tokenizer and model do not belong together"):
        tokenizer.encode(["xyz"], add_special_tokens=False)


def test_a_text_of_one_token_is_told_from_one_of_several(tmp_path: Path) -> None:
    tokenizer = PolicyTokenizer.load(write_policy(tmp_path))
    assert tokenizer.token_of("\n") == tokenizer.encode(["\n"], add_special_tokens=False)[0][0]
    assert tokenizer.token_of("<|end|>") == 3
    assert tokenizer.token_of("ab") is None


def test_a_missing_or_damaged_model_directory_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        PolicyTokenizer.load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        PolicyTokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 10, "max_position_embeddings": 10, "model_type": "qwen3"}')
    with pytest.raises(ModelError, match="holds no tokenizer"):
        PolicyTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="no tokenizer could be loaded"):
        PolicyTokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        PolicyTokenizer.load(tmp_path)


def test_chat_template_is_used_when_there_is_one_and_refused_when_there_is_none(tmp_path: Path) -> None:
    plain = PolicyTokenizer.load(write_policy(tmp_path / "plain"))
    chat = PolicyTokenizer.load(write_policy(tmp_path / "chat", chat_template=CHAT_TEMPLATE))
    assert chat.uses_chat_template("auto") and not plain.uses_chat_template("auto")
    assert not chat.uses_chat_template(False)
    assert chat.render_chat([{"role": "user", "content": "1+1"}]) == "u=1+1\na="
    with pytest.raises(ConfigError, match="has no chat template"):
        plain.uses_chat_template(True)
