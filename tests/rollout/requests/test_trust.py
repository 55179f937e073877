"""An engine that answers garbage is found by its answers; where all do, no engine is to blame."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollout.requests.trust import MOST, WINDOW, Trust


def told_after(*answers: tuple[str, bool]) -> list[tuple[int, str]]:
    """(number of the answer, engine) of each conviction; the answers are (engine, whether it is malformed)."""
    trust, convicted = Trust(), []
    for number, (engine, malformed) in enumerate(answers):
        if not malformed:
            trust.believed(engine)
        elif trust.malformed(engine) is not None:
            convicted.append((number, engine))
    return convicted


def test_the_one_engine_that_answers_garbage_is_not_trusted_for_long() -> None:
    beside = [("good", False), ("bad", True)]
    assert told_after(*beside * MOST) == [(2 * MOST - 1, "bad")]
    assert len(told_after(*beside * 3 * MOST)) == 3, "it begins anew each time"
    mixed = [("good", False), ("bad", True), *[("bad", False)] * 4]
    assert [engine for _, engine in told_after(*mixed * 12)] == ["bad"], "also one that answers well now and then"


def test_a_few_malformed_answers_cost_no_engine_its_place() -> None:
    seldom = [("a", True), *[("a", False), ("b", False)] * (WINDOW // (MOST - 1) + 1)]
    assert told_after(*seldom * 50) == []


def test_no_engine_is_to_blame_where_all_of_them_or_the_only_one_answer_garbage() -> None:
    assert told_after(*[("only", True)] * 1000) == []
    assert told_after(*[("a", True), ("b", True), ("c", True)] * 1000) == []


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=300))
def test_whoever_is_not_trusted_gave_most_of_the_malformed_answers(answers: list[tuple[str, bool]]) -> None:
    for number, engine in told_after(*answers):
        before = [malformed for name, malformed in answers[: number + 1] if name == engine]
        assert sum(before[-WINDOW:]) >= MOST and len({name for name, _ in answers[:number]}) > 1
