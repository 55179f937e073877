from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from asyncrl.data.sample import VersionSpan
from asyncrl.rollout.requests.partial import PartialRollout
from asyncrl.rollout.requests.stops import ended_at_stop
from asyncrl.rollout.requests.wire import Generation, SamplingParams

PIECES = ("a", "b", "</", "s>", "</s>", "</s>a", "<", "/", "s", ">", "")
STOP = ("</s>", "bb")
TOKENS = st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12)


def text_of(ids: NDArray[np.int32]) -> str:
    return "".join(PIECES[i] for i in ids)


def generation(ids: list[int]) -> Generation:
    count = len(ids)
    spans = (VersionSpan("0.1", 0, count // 2), VersionSpan("0.2", count // 2, count))
    spans = tuple(span for span in spans if span.end > span.start)
    return Generation(np.array(ids, np.int32), -np.arange(count, dtype=np.float32), "length", spans, "", "engine-0")


@given(TOKENS)
def test_a_response_ends_with_the_token_that_completes_the_first_stop_string(ids: list[int]) -> None:
    made = ended_at_stop(generation(ids), STOP, text_of)
    lengths = [n for n in range(1, len(ids) + 1) if any(stop in text_of(np.array(ids[:n])) for stop in STOP)]
    if not lengths:
        assert made is None
        return
    assert made is not None
    first = lengths[0]
    assert made.output_ids.tolist() == ids[:first] and made.logprobs.tolist() == [-float(i) for i in range(first)]
    assert made.finish_reason == "stop" and made.engine == "engine-0"
    assert made.versions[0].start == 0 and made.versions[-1].end == first
    assert all(a.end == b.start for a, b in itertools.pairwise(made.versions))
    assert any(made.text.endswith(stop) for stop in STOP)
    assert text_of(made.output_ids).startswith(made.text)
    assert not any(stop in made.text[:-1] for stop in STOP)


@given(TOKENS, st.data())
def test_a_stop_string_that_an_abort_cut_in_two_ends_the_response_all_the_same(
    ids: list[int], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(ids)))
    partial = PartialRollout.begin(b"[1]", SamplingParams(20, 1.0, stop=STOP))  # type: ignore[arg-type]
    for piece in (ids[:cut], ids[cut:]):
        if piece:
            partial = partial.extended(generation(piece))
    whole = ended_at_stop(partial.whole("length", text_of), STOP, text_of)
    alone = ended_at_stop(generation(ids), STOP, text_of)
    assert (whole is None) == (alone is None)
    if whole is not None and alone is not None:
        assert (whole.output_ids.tolist(), whole.text) == (alone.output_ids.tolist(), alone.text)
