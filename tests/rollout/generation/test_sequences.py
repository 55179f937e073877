"""The rule that makes sequences of the requests of a session."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.sample import TokenSequence, VersionSpan
from asyncrl.rollout.generation.sequences import Exchange, sequences_of
from asyncrl.rollout.requests.wire import Generation


def exchange(sent: list[int], answer: list[int], version: str = "0.0") -> Exchange:
    ids, logprobs = np.array(answer, np.int32), -np.arange(1, len(answer) + 1, dtype=np.float32)
    spans = (VersionSpan(version, 0, len(answer)),)
    return Exchange(np.array(sent, np.int32), Generation(ids, logprobs, "stop", spans, ""))


def plain(sequences: tuple[TokenSequence, ...]) -> list[list[tuple[list[int], list[int]]]]:
    """Context and output of each turn."""
    return [[(t.context_ids.tolist(), t.output_ids.tolist()) for t in sequence.turns] for sequence in sequences]


def test_the_example_of_the_modules_docstring_is_true() -> None:
    first, second = exchange([7, 7, 7], [4, 5]), exchange([7, 7, 7, 4, 5, 8, 8], [6, 9], "0.1")
    assert plain(sequences_of([first, second])) == [[([7, 7, 7], [4, 5]), ([8, 8], [6, 9])]]
    both = sequences_of([first, second, exchange([7, 7, 9], [3])])
    assert plain(both) == [[([7, 7, 7], [4, 5]), ([8, 8], [6, 9])], [([7, 7, 9], [3])]]
    assert both[0].spans() == (VersionSpan("0.0", 3, 5), VersionSpan("0.1", 7, 9))


def test_one_request_is_one_sequence_whose_context_is_what_was_sent() -> None:
    only = exchange([1, 2], [3])
    [sequence] = sequences_of([only])
    assert sequence.turns[0].context_ids is only.input_ids and sequence.turns[0].versions == only.generation.versions


def test_an_answer_that_is_left_out_or_changed_in_the_history_begins_another_sequence() -> None:
    first = exchange([1, 2], [3, 4])
    for sent in ([1, 2], [1, 2, 3], [1, 2, 3, 5, 6], [9, 2, 3, 4, 5]):
        assert plain(sequences_of([first, exchange(sent, [8])])) == [[([1, 2], [3, 4])], [(sent, [8])]]
    assert plain(sequences_of([first, exchange([1, 2, 3, 4], [8])])) == [[([1, 2], [3, 4]), ([], [8])]]


def test_of_several_sequences_that_could_go_on_the_longest_does_and_among_equals_the_latest() -> None:
    short, twin, long = exchange([1], [2]), exchange([1], [2]), exchange([1, 2, 3], [4])
    assert plain(sequences_of([short, twin, long])) == [[([1], [2])], [([1], [2]), ([3], [4])]]
    assert plain(sequences_of([short, twin, long, exchange([1, 2, 3, 4], [5])]))[1][2] == ([], [5])
    assert plain(sequences_of([short, twin, long, exchange([1, 2, 7], [5])]))[0] == [([1], [2]), ([7], [5])]


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@given(st.lists(st.tuples(st.booleans(), TOKENS, TOKENS), max_size=8))
def test_every_answer_is_in_one_turn_after_exactly_what_was_sent_for_it(
    requests: list[tuple[bool, list[int], list[int]]],
) -> None:
    exchanges: list[Exchange] = []
    for goes_on, context, answer in requests:
        before = exchanges[-1] if goes_on and exchanges else None
        history = [] if before is None else [*before.input_ids.tolist(), *before.generation.output_ids.tolist()]
        exchanges.append(exchange([*history, *context], answer))
    read: list[tuple[list[int], list[int]]] = []
    for sequence in sequences_of(exchanges):
        ids: list[int] = []
        for turn in sequence.turns:
            ids += turn.context_ids.tolist()
            read.append((list(ids), turn.output_ids.tolist()))
            assert len(turn.logprobs) == len(turn.output_ids) == turn.versions[-1].end
            ids += turn.output_ids.tolist()
    sent = [(e.input_ids.tolist(), e.generation.output_ids.tolist()) for e in exchanges]
    assert sorted(read) == sorted(sent)
