from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.sample import VersionSpan
from asyncrl.rollout.requests.wire import SamplingParams, attribute_steps_in_flight, encode_prompt, encode_request


def test_a_request_carries_ids_and_sampling_as_json() -> None:
    prompt = encode_prompt(np.array([5, 0, 99], np.int32), 100)
    sampling = SamplingParams(max_new_tokens=7, temperature=0.7, stop_token_ids=(2, 3))
    assert json.loads(encode_request("rid", prompt, sampling)) == {
        "rid": "rid",
        "input_ids": [5, 0, 99],
        "sampling_params": {
            "max_new_tokens": 7,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "skip_special_tokens": False,
            "stop_token_ids": [2, 3],
        },
        "return_logprob": True,
        "stream": False,
    }


def test_stop_tokens_are_not_sent_with_ignore_eos_where_they_have_no_effect() -> None:
    params = json.loads(bytes(SamplingParams(1, 1.0, stop_token_ids=(2,), ignore_eos=True).encode()))
    assert params["ignore_eos"] is True and "stop_token_ids" not in params


@pytest.mark.parametrize("ids", [[], [100], [-1], [1, 2**31 - 1]])
def test_ids_that_would_kill_the_engine_are_not_encoded(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids must be in"):
        encode_prompt(np.array(ids, np.int32), 100)


# stamps of engines that are paused in place


@st.composite
def stamped(draw: st.DrawFn) -> tuple[str | None, list[int], list[VersionSpan], list[int]]:
    """What a request was sent under, the maker of each token, and what the engine says: the token in flight at a pause
    is stamped with the weights that came."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    makers, stamps = [], []
    for version, length in enumerate(lengths):
        in_flight = version > 0 and draw(st.booleans()) and length > 0
        makers += [version - 1 if in_flight and i == 0 else version for i in range(length)]
        stamps += [version] * length
    spans: list[VersionSpan] = []
    for i, version in enumerate(stamps):
        if spans and spans[-1].version == f"0.{version}":
            spans[-1] = VersionSpan(f"0.{version}", spans[-1].start, i + 1)
        else:
            spans.append(VersionSpan(f"0.{version}", i, i + 1))
    return "0.0", makers, spans, stamps


@given(stamped())
def test_no_token_is_attributed_to_newer_weights_than_its_own(
    case: tuple[str | None, list[int], list[VersionSpan], list[int]],
) -> None:
    sent_under, makers, spans, stamps = case
    told = attribute_steps_in_flight(spans, sent_under)
    assert [span.start for span in told] == [0, *(span.end for span in told)][: len(told)]
    assert not told or told[-1].end == len(makers)
    by_token = [int(span.version[2:]) for span in told for _ in range(span.end - span.start)]
    assert all(say <= made for say, made in zip(by_token, makers, strict=True))
    changes = sum(a != b for a, b in zip([0, *stamps], stamps, strict=False))
    assert sum(say != stamp for say, stamp in zip(by_token, stamps, strict=True)) <= changes
    assert len({span.version for span in told}) == len(told)


def test_without_a_version_of_its_own_a_request_counts_with_the_first_stamp() -> None:
    spans = [VersionSpan("a", 0, 2), VersionSpan("b", 2, 3), VersionSpan("c", 3, 5)]
    told = attribute_steps_in_flight(spans, None)
    assert told == (VersionSpan("a", 0, 3), VersionSpan("b", 3, 4), VersionSpan("c", 4, 5))
    assert attribute_steps_in_flight([], "a") == ()
