from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.sample import VersionSpan
from asyncrl.rollout.requests.retry import RequestFault
from asyncrl.rollout.requests.wire import (
    AttemptFailed,
    SamplingParams,
    attribute_steps_in_flight,
    decode_answer,
    encode_prompt,
    encode_request,
)

FLOAT32 = st.floats(-100, 0, width=32)


def answer(ids: list[int], logprobs: list[float], **meta: Any) -> bytes:
    fields = {
        "id": "x",
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[lp, i, None] for lp, i in zip(logprobs, ids, strict=True)],
        "weight_version": "0.3",
        "cached_tokens_details": {"device": 1, "host": 0},
    }
    return json.dumps({"text": "tëxt", "output_ids": ids, "meta_info": fields | meta}).encode()


def failure_kind(status: int, body: bytes) -> RequestFault:
    with pytest.raises(AttemptFailed) as failed:
        decode_answer(status, body, 100)
    return failed.value.kind


@given(st.lists(st.tuples(st.integers(0, 99), FLOAT32), min_size=1))
def test_ids_and_logprobs_arrive_exactly_as_sampled(tokens: list[tuple[int, float]]) -> None:
    ids, logprobs = [t[0] for t in tokens], [t[1] for t in tokens]
    generation = decode_answer(200, answer(ids, logprobs), 100)
    assert generation.output_ids.tolist() == ids and generation.output_ids.dtype == np.int32
    assert generation.logprobs.tolist() == logprobs and generation.logprobs.dtype == np.float32
    assert generation.text == "tëxt" and generation.finish_reason == "stop"
    assert generation.versions == (VersionSpan("0.3", 0, len(ids)),)


def test_weight_versions_become_spans() -> None:
    spans = [{"version": "0.1", "start": 0, "end": 1}, {"version": "0.2", "start": 1, "end": 3}]
    generation = decode_answer(200, answer([1, 2, 3], [-1, -1, -1], weight_versions=spans), 100)
    assert generation.versions == (VersionSpan("0.1", 0, 1), VersionSpan("0.2", 1, 3))


@pytest.mark.parametrize(
    "spans",
    [
        [("0.1", 0, 2)],
        [("0.1", 1, 3)],
        [("0.1", 0, 1), ("0.2", 2, 3)],
        [("0.1", 0, 4)],
        [],
        [("0.1", 0, 1), ("torn:0.2", 1, 3)],
    ],
)
def test_spans_with_gaps_or_torn_weights_are_no_sample(spans: list[tuple[str, int, int]]) -> None:
    listed = [{"version": v, "start": s, "end": e} for v, s, e in spans]
    assert failure_kind(200, answer([1, 2, 3], [-1, -1, -1], weight_versions=listed)) is RequestFault.MALFORMED


@pytest.mark.parametrize(
    "body",
    [
        answer([100], [-1.0]),
        answer([-1], [-1.0]),
        answer([2**31 + 5], [-1.0]),
        answer([2**32 - 1], [-1.0]),
        answer([2**40], [-1.0]),
        answer([1], [-1.0]).replace(b"[-1.0, 1, null]", b"[]"),
        answer([1], [-1.0]).replace(b'"output_ids": [1]', b'"output_ids": [1, 2]'),
        answer([1], [-1.0]).replace(b'"output_ids": [1]', b'"output_ids": null'),
        answer([], []),
        answer([1], [float("-inf")]),
        answer([1], [float("nan")]),
        answer([1], [-1.0], finish_reason={"type": "new"}),
        answer([1], [-1.0]).replace(b"-1.0", b"null"),
        answer([1], [-1.0]).replace(b"-1.0", b"-1e400"),
        answer([1], [-1e39]),
        answer([1], [-1.0])[:-1],
        b"",
        b"[]",
        b"\xff\xfe",
        b"<html>",
    ],
)
def test_an_answer_that_cannot_have_been_sampled_is_malformed(body: bytes) -> None:
    assert failure_kind(200, body) is RequestFault.MALFORMED


@given(st.binary(max_size=200), st.integers(200, 599))
def test_no_body_and_no_status_escapes_the_taxonomy(body: bytes, status: int) -> None:
    assert failure_kind(status, body) in RequestFault


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RequestFault.REFUSED),
        (404, RequestFault.REFUSED),
        (408, RequestFault.BUSY),
        (429, RequestFault.BUSY),
        (500, RequestFault.SERVER_ERROR),
        (502, RequestFault.SERVER_ERROR),
        (503, RequestFault.BUSY),
        (301, RequestFault.SERVER_ERROR),
    ],
)
def test_each_status_has_its_kind(status: int, kind: RequestFault) -> None:
    assert failure_kind(status, b'{"error": {"message": "why"}}') is kind


def test_the_message_inside_an_error_body_is_kept() -> None:
    for body in (
        b'{"error": {"message": "too long"}}',
        b'{"message": "too long"}',
        b'{"detail": "too long"}',
        b"too long",
    ):
        with pytest.raises(AttemptFailed, match="HTTP 400: too long"):
            decode_answer(400, body, 100)


def test_an_aborted_request_is_retried_unless_the_engine_refused_it() -> None:
    aborted = answer([1], [-1.0], finish_reason={"type": "abort", "message": "Aborted", "status_code": None})
    refused = answer([1], [-1.0], finish_reason={"type": "abort", "message": "too long", "status_code": 400})
    busy = answer([1], [-1.0], finish_reason={"type": "abort", "message": "queue full", "status_code": 503})
    assert failure_kind(200, aborted) is RequestFault.ABORTED
    assert failure_kind(200, refused) is RequestFault.REFUSED
    assert failure_kind(200, busy) is RequestFault.BUSY


@pytest.mark.parametrize(
    ("ids", "meta", "kept"),
    [
        ([1, 2], {}, [1, 2]),
        ([], {}, None),
        ([1, 2], {"weight_version": "torn:0.4"}, None),
        ([1, 2], {"weight_versions": [{"version": "0.3", "start": 0, "end": 1}]}, None),
    ],
    ids=["as it is", "nothing was generated", "torn weights", "versions that leave a token out"],
)
def test_what_an_aborted_request_had_generated_comes_with_the_failure(
    ids: list[int], meta: dict[str, Any], kept: list[int] | None
) -> None:
    end = {"type": "abort", "message": "Aborted", "status_code": None}
    with pytest.raises(AttemptFailed, match="aborted: Aborted") as failed:
        decode_answer(200, answer(ids, [-1.0] * len(ids), finish_reason=end, **meta), 100)
    partial = failed.value.partial
    assert (None if partial is None else partial.output_ids.tolist()) == kept


def test_an_aborted_request_that_had_not_begun_need_not_name_tokens() -> None:
    end = {"type": "abort", "message": "Aborted", "status_code": None}
    body = json.dumps({"text": "", "meta_info": {"finish_reason": end}}).encode()
    assert failure_kind(200, body) is RequestFault.ABORTED
    assert failure_kind(200, body.replace(b'"abort"', b'"stop"')) is RequestFault.MALFORMED


def test_a_request_carries_ids_and_sampling_as_json() -> None:
    prompt = encode_prompt(np.array([5, 0, 99], np.int32), 100)
    sampling = SamplingParams(max_new_tokens=7, temperature=0.7, stop_token_ids=(2, 3))
    assert json.loads(encode_request("rid", prompt, sampling.encode())) == {
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
