"""Responses that were aborted on the way, and come out whole."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.sample import FinishReason, VersionSpan
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.rollout.requests.partial import PartialRollout
from asyncrl.rollout.requests.wire import Generation, SamplingParams

PROMPT = msgspec.Raw(b"[7,8]")
TOKENS = tuple(range(10, 22))


def sampling(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0.7, stop_token_ids=(3,))


def piece(tokens: tuple[int, ...], versions: str, finish: FinishReason = "abort") -> Generation:
    """`versions` has a letter for each token."""
    spans, at = [], 0
    for version, run in itertools.groupby(versions):
        count = len(list(run))
        spans.append(VersionSpan(version, at, at + count))
        at += count
    ids = np.array(tokens, np.int32)
    return Generation(ids, ids.astype(np.float32) / -8, finish, tuple(spans), "not used")


def letters(spans: tuple[VersionSpan, ...]) -> str:
    return "".join(span.version * (span.end - span.start) for span in spans)


def text_of(ids: np.ndarray) -> str:
    return " ".join(map(str, ids))


@given(
    cuts=st.lists(st.integers(1, len(TOKENS) - 1), unique=True),
    versions=st.text("abc", min_size=len(TOKENS), max_size=len(TOKENS)),
)
def test_however_often_it_is_aborted_a_response_is_what_it_would_have_been(cuts: list[int], versions: str) -> None:
    partial = PartialRollout.begin(PROMPT, sampling(len(TOKENS)))
    edges = [0, *sorted(cuts), len(TOKENS)]
    for start, end in itertools.pairwise(edges[:-1]):
        partial = partial.extended(piece(TOKENS[start:end], versions[start:end]))
        asked = partial.sampling
        assert msgspec.json.decode(partial.input_ids) == [7, 8, *TOKENS[:end]]
        assert asked == sampling(len(TOKENS) - end), "as much as is left, sampled as before"
        assert partial.end is None
    whole = partial.extended(piece(TOKENS[edges[-2] :], versions[edges[-2] :])).whole("length", text_of)
    alone = piece(TOKENS, versions, "length")
    assert whole.output_ids.tolist() == alone.output_ids.tolist() and whole.output_ids.dtype == np.int32
    assert whole.logprobs.tolist() == alone.logprobs.tolist() and whole.logprobs.dtype == np.float32
    assert letters(whole.versions) == versions and whole.versions == alone.versions
    assert whole.finish_reason == "length" and whole.text == text_of(alone.output_ids)


@pytest.mark.parametrize(("finish", "text"), [("length", "10 11 3"), ("stop", "10 11")])
def test_the_text_has_no_token_that_stopped_it(finish: FinishReason, text: str) -> None:
    partial = PartialRollout.begin(PROMPT, sampling(5)).extended(piece((10,), "a")).extended(piece((11, 3), "aa"))
    assert partial.whole(finish, text_of).text == text


@pytest.mark.parametrize(
    ("tokens", "end"), [((10, 11), None), ((10, 11, 12), "length"), ((10, 3), "stop"), ((10, 11, 3), "stop")]
)
def test_an_abort_may_come_with_the_last_token(tokens: tuple[int, ...], end: FinishReason | None) -> None:
    """An engine that is asked to go on after an end token would do so."""
    assert PartialRollout.begin(PROMPT, sampling(3)).extended(piece(tokens, "a" * len(tokens))).end == end


def test_nothing_ends_a_response_early_that_is_to_ignore_its_end_tokens() -> None:
    params = SamplingParams(max_new_tokens=3, temperature=1.0, stop_token_ids=(3,), ignore_eos=True)
    assert PartialRollout.begin(PROMPT, params).extended(piece((10, 3), "aa")).end is None


def test_ids_become_the_text_that_an_engine_makes_of_them(tokenizer: PolicyTokenizer) -> None:
    (ids,) = tokenizer.encode(["ab"], add_special_tokens=False)
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(np.append(ids, np.int32(tokenizer.eos_token_id or 0))) == "ab", "no end token"
