from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.sample import VersionSpan
from asyncrl.rollout.requests.answers import Asked, AttemptFailed, Defect, decode_answer
from asyncrl.rollout.requests.retry import RequestFault
from asyncrl.rollout.requests.wire import SamplingParams

FLOAT32 = st.floats(-100, 0, width=32)
ASKED = Asked("x", SamplingParams(max_new_tokens=400, temperature=1.0), 100)


def answer(ids: list[int], logprobs: list[float], **meta: Any) -> bytes:
    fields = {
        "id": "x",
        "finish_reason": {"type": "stop", "matched": ids[-1]} if ids else {"type": "stop"},
        "output_token_logprobs": [[lp, i, None] for lp, i in zip(logprobs, ids, strict=True)],
        "weight_version": "0.3",
        "cached_tokens_details": {"device": 1, "host": 0},
    }
    return json.dumps({"text": "tëxt", "output_ids": ids, "meta_info": fields | meta}).encode()


def failure_kind(status: int, body: bytes) -> RequestFault:
    with pytest.raises(AttemptFailed) as failed:
        decode_answer(status, body, ASKED)
    return failed.value.kind


@given(st.lists(st.tuples(st.integers(0, 99), FLOAT32), min_size=1))
def test_ids_and_logprobs_arrive_exactly_as_sampled(tokens: list[tuple[int, float]]) -> None:
    ids, logprobs = [t[0] for t in tokens], [t[1] for t in tokens]
    generation = decode_answer(200, answer(ids, logprobs), ASKED)
    assert generation.output_ids.tolist() == ids and generation.output_ids.dtype == np.int32
    assert generation.logprobs.tolist() == logprobs and generation.logprobs.dtype == np.float32
    assert generation.text == "tëxt" and generation.finish_reason == "stop"
    assert generation.versions == (VersionSpan("0.3", 0, len(ids)),)


def test_weight_versions_become_spans() -> None:
    spans = [{"version": "0.1", "start": 0, "end": 1}, {"version": "0.2", "start": 1, "end": 3}]
    generation = decode_answer(200, answer([1, 2, 3], [-1, -1, -1], weight_versions=spans), ASKED)
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
            decode_answer(400, body, ASKED)


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
        decode_answer(200, answer(ids, [-1.0] * len(ids), finish_reason=end, **meta), ASKED)
    partial = failed.value.partial
    assert (None if partial is None else partial.output_ids.tolist()) == kept


def test_an_aborted_request_that_had_not_begun_need_not_name_tokens() -> None:
    end = {"type": "abort", "message": "Aborted", "status_code": None}
    body = json.dumps({"text": "", "meta_info": {"finish_reason": end}}).encode()
    assert failure_kind(200, body) is RequestFault.ABORTED
    assert failure_kind(200, body.replace(b'"abort"', b'"stop"')) is RequestFault.MALFORMED


# what cannot have been sampled


DEEP = b"[" * 300_000 + b"]" * 300_000


@pytest.mark.parametrize("status", [200, 404, 500])
def test_json_of_any_depth_is_a_failed_attempt(status: int) -> None:
    with pytest.raises(AttemptFailed) as failed:
        decode_answer(status, DEEP, ASKED)
    assert len(str(failed.value)) < 2000
    inside = answer([1], [-1.0]).replace(b'"text"', b'"more": ' + DEEP + b', "text"')
    with pytest.raises(AttemptFailed):
        decode_answer(status, inside, ASKED)


@pytest.mark.parametrize(
    ("body", "defect", "told"),
    [
        (answer([1], [-3e38]), Defect.LOGPROBS, r"-3e\+38 of token 1 of 1"),
        (answer([1, 5], [-1.0, 50.0]), Defect.LOGPROBS, "50 of token 2 of 2"),
        (answer([1] * 401, [-1.0] * 401), Defect.LENGTH, "401 tokens with log-probs, at most 400"),
        (answer([1, 5], [-1.0, -1.0]).replace(b"[-1.0, 5, null]", b"[-1.0, 6, null]"), Defect.IDS, "2 tokens"),
        (answer([1], [-1.0], id="other"), Defect.FOREIGN, "'other' instead of 'x'"),
        (answer([1, 3, 1], [-1.0] * 3), Defect.END, "token 2 of 3 is the end token 3"),
        (answer([1], [-1.0], finish_reason={"type": "stop", "matched": "NaN happened"}), Defect.END, "NaN happened"),
        (answer([1], [-1.0], weight_version="torn:0.2@engine-1"), Defect.VERSIONS, r"torn:0.2 \(answer of engine-1\)"),
        (answer([1], [-1.0], weight_version="0.3@engine-1", id=[]), Defect.UNREADABLE, r"\(answer of engine-1\)"),
    ],
)
def test_each_defect_is_told_with_what_is_wrong_and_which_engine_answered(
    body: bytes, defect: Defect, told: str
) -> None:
    with pytest.raises(AttemptFailed, match=told) as failed:
        decode_answer(200, body, Asked("x", SamplingParams(400, 1.0, stop_token_ids=(3,)), 100))
    assert failed.value.kind is RequestFault.MALFORMED and failed.value.defect is defect
    assert str(failed.value).startswith(f"malformed: {defect}: ")


@st.composite
def true_answers(draw: st.DrawFn) -> tuple[dict[str, Any], Asked]:
    """An answer as the engine writes it, and the request that it answers."""
    most = draw(st.integers(1, 6))
    sampling = SamplingParams(most, 1.0, stop_token_ids=(2, 3), ignore_eos=draw(st.booleans()), stop=("</answer>",))
    ids = draw(st.lists(st.integers(0, 99), min_size=1, max_size=most))
    if not sampling.ignore_eos:
        ids = [*(5 if i in (2, 3) else i for i in ids[:-1]), ids[-1]]
    finish: dict[str, Any] = {"type": "length", "length": len(ids)}
    if draw(st.booleans()):
        matched = draw(st.sampled_from([ids[-1], "</answer>", None]))
        finish = {"type": "stop", "matched": matched}
    cut = draw(st.integers(0, len(ids)))
    spans = [{"version": "0.1@e", "start": 0, "end": cut}, {"version": "0.2@e", "start": cut, "end": len(ids)}]
    meta = {
        "id": "n-00000000.000.0000",
        "finish_reason": finish,
        "prompt_tokens": 3,
        "weight_version": "0.2@e",
        "weight_versions": draw(st.sampled_from([spans, None])),
        "output_token_logprobs": [[draw(FLOAT32), token, None] for token in ids],
        "cached_tokens_details": {"device": 1, "host": 0},
    }
    return {"text": "tëxt", "output_ids": ids, "meta_info": meta}, Asked("n-00000000.000.0000", sampling, 100)


VALUES: st.SearchStrategy[Any] = st.one_of(
    st.integers(-2, 105),
    st.sampled_from([2**31, 2**63, 2**70, None, "", "x", "</answer>", "NaN happened", "torn:0.2@e", [], {}, True]),
    st.sampled_from(["stop", "length", -3e38, 1e39, 50.0, 5e-4, -105.0, -103.5]),
)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[dict[str, Any], Asked]:
    """A true answer of which up to three places were changed, doubled, swapped or taken out."""
    made, asked = draw(true_answers())
    for _ in range(draw(st.integers(0, 3))):
        places = [place for place in _places(made) if place[0]]
        at, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["change", "change", "remove", "double", "swap"])):
            case "change":
                at[key] = draw(VALUES)
            case "remove":
                del at[key]
            case "double" if isinstance(at, list):
                at.insert(key, at[key])
            case "swap" if isinstance(at, list) and len(at) > 1:
                at[0], at[-1] = at[-1], at[0]
    return made, asked


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each (container, key) in a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def sampled(made: dict[str, Any], asked: Asked) -> bool:
    """Whether this answer can have been sampled for this request: the rule, token by token."""
    meta, text, ids = made.get("meta_info"), made.get("text"), made.get("output_ids", [])
    if not isinstance(meta, dict) or not isinstance(text, str) or not isinstance(ids, list):
        return False
    finish, tokens, spans = (
        meta.get("finish_reason"),
        meta.get("output_token_logprobs", []),
        meta.get("weight_versions"),
    )
    stamp, stops = meta.get("weight_version", ""), () if asked.sampling.ignore_eos else asked.sampling.stop_token_ids
    if meta.get("id") != asked.rid or not isinstance(finish, dict) or not isinstance(tokens, list):
        return False
    if finish.get("type") not in ("stop", "length") or not isinstance(stamp, str):
        return False
    if not 1 <= len(ids) <= asked.sampling.max_new_tokens or len(tokens) != len(ids):
        return False
    for place, (token, beside) in enumerate(zip(ids, tokens, strict=True)):
        if not isinstance(beside, list) or len(beside) < 2:
            return False
        logprob = beside[0]
        if not _whole(token) or not 0 <= token < asked.vocab_size or not _whole(beside[1]) or beside[1] != token:
            return False
        if not isinstance(logprob, int | float) or isinstance(logprob, bool) or not -104.0 <= logprob <= 1e-3:
            return False
        if token in stops and place < len(ids) - 1:
            return False
    matched = finish.get("matched")
    if isinstance(matched, bool | float | dict) or (isinstance(matched, int) and not _whole(matched)):
        return False
    if finish["type"] == "stop" and isinstance(matched, int) and matched != ids[-1]:
        return False
    if finish["type"] == "stop" and isinstance(matched, str) and matched not in asked.sampling.stop:
        return False
    makers: list[str] = [stamp] * len(ids)
    if spans is not None:
        if not isinstance(spans, list):
            return False
        makers = []
        for span in spans:
            if not isinstance(span, dict) or not isinstance(span.get("version"), str):
                return False
            start, end = span.get("start"), span.get("end")
            if not _whole(start) or not _whole(end):
                return False
            if end > start:
                if start != len(makers) or end > len(ids):
                    return False
                makers += [span["version"]] * (end - start)
    return len(makers) == len(ids) and not any(maker.startswith("torn:") for maker in makers)


@settings(max_examples=400)
@given(mutated(), st.sampled_from([(",", ":"), (", ", ": ")]))
def test_whatever_cannot_have_been_sampled_is_refused_and_whatever_can_is_accepted(
    case: tuple[dict[str, Any], Asked], separators: tuple[str, str]
) -> None:
    made, asked = case
    body = json.dumps(made, separators=separators).encode()
    if sampled(made, asked):
        generation = decode_answer(200, body, asked)
        assert generation.output_ids.tolist() == made["output_ids"]
        assert generation.logprobs.tolist() == [np.float32(t[0]) for t in made["meta_info"]["output_token_logprobs"]]
        assert all("@" not in span.version for span in generation.versions)
    else:
        with pytest.raises(AttemptFailed) as failed:
            decode_answer(200, body, asked)
        assert failed.value.kind is RequestFault.MALFORMED and failed.value.defect is not None


@given(true_answers(), st.data())
def test_a_body_that_was_cut_or_garbled_is_never_anything_but_an_answer_or_a_failed_attempt(
    case: tuple[dict[str, Any], Asked], data: st.DataObject
) -> None:
    made, asked = case
    body = bytearray(json.dumps(made).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with suppress(AttemptFailed):
        decode_answer(200, bytes(body[: data.draw(st.integers(0, len(body)))]), asked)
