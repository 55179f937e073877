"""Secrets never reach a saved configuration, a report or a message."""

from __future__ import annotations

import pytest

from asyncrl.config import Config
from asyncrl.config.reading.redaction import is_secret, redacted
from asyncrl.config.reading.toml import config_toml


@pytest.mark.parametrize(
    "key",
    [
        "hf_token",
        "token",
        "HF_TOKEN",
        "accessToken",
        "api_key",
        "apiKey",
        "apikey",
        "OPENAI_API_KEY",
        "db_password",
        "secret",
        "client-secret",
        "aws_secret_access_key",
        "private_key",
    ],
)
def test_a_key_that_names_a_secret_is_known(key):
    assert is_secret(key)


@pytest.mark.parametrize(
    "key",
    [
        "max_tokens",
        "max_new_tokens",
        "max_total_tokens",
        "prompt_key",
        "answer_key",
        "tokenizer",
        "monkey",
        "secretary",
    ],
)
def test_a_key_that_only_sounds_like_a_secret_is_not(key):
    assert not is_secret(key)


def test_secrets_are_blanked_out_at_any_depth_and_in_urls():
    config = Config.model_validate(
        {
            "data": {"args": {"hf_token": "s3cret", "a": {"b": {"password": "s3cret"}}, "list": [{"token": "s3cret"}]}},
            "reward": {"args": {"api_key": "s3cret", "url": "https://user:s3cret@host/x"}},
            "eval": {"data": {"args": {"credentials": ["s3cret"]}}},
        }
    )
    text = config_toml(config)
    assert "s3cret" not in text
    assert text.count("<redacted>") == 6
    assert "host/x" in text


def test_what_is_no_secret_stays():
    assert redacted("stop", ("a", "b")) == ("a", "b")
    assert redacted("max_tokens", 5) == 5
