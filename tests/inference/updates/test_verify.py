from __future__ import annotations

from asyncrl.inference.sglang.engine_api import RankChecksums
from asyncrl.inference.updates.verify import abbreviate, differing, disagreement, unreceived


def ranks(*checksums: dict[str, str]) -> tuple[RankChecksums, ...]:
    return tuple(RankChecksums(c, str(sorted(c.items()))) for c in checksums)


def test_a_tensor_that_kept_its_random_numbers_was_not_received() -> None:
    before = ranks({"a": "r1", "b": "r2"}, {"a": "r3", "b": "r4"})
    after = ranks({"a": "x", "b": "y"}, {"a": "z", "b": "r4"})
    assert unreceived(before, after) == ("b",)
    assert unreceived(before, ranks({"a": "x", "b": "y"}, {"a": "z", "b": "w"})) == ()


def test_engines_that_agree_are_not_accused() -> None:
    assert disagreement({"e0": ranks({"a": "1"}), "e1": ranks({"a": "1"})}) == {}
    assert disagreement({}) == {}


def test_the_engine_outside_the_majority_is_named_with_its_tensors() -> None:
    checksums = {
        "e0": ranks({"a": "9", "b": "2"}),
        "e1": ranks({"a": "1", "b": "2"}),
        "e2": ranks({"a": "1", "b": "2"}),
    }
    assert disagreement(checksums) == {"e0": ("a",)}


def test_of_engines_that_disagree_without_a_majority_none_is_believed() -> None:
    right, wrong = ranks({"a": "1", "b": "2"}), ranks({"a": "9", "b": "2"})
    for checksums in ({"e0": right, "e1": wrong}, {"e1": wrong, "e0": right}):
        assert disagreement(checksums) == {"e0": ("a",), "e1": ("a",)}
    four = {"e0": right, "e1": wrong, "e2": right, "e3": wrong}
    assert disagreement(four) == dict.fromkeys(four, ("a",))
    assert disagreement(four | {"e4": right}) == {"e1": ("a",), "e3": ("a",)}


def test_engines_with_other_numbers_of_ranks_hold_other_shards_and_are_not_compared() -> None:
    halves, quarters = ranks({"a": "1"}, {"a": "2"}), ranks({"a": "1"}, {"a": "2"}, {"a": "3"}, {"a": "4"})
    whole, wrong = ranks({"a": "0"}), ranks({"a": "9"})
    assert disagreement({"e0": halves, "e1": quarters, "e2": whole, "e3": whole, "e4": wrong}) == {"e4": ("a",)}


def test_a_missing_tensor_or_rank_is_a_difference() -> None:
    assert differing(ranks({"a": "1", "b": "2"}), ranks({"a": "1"})) == ("b",)
    assert differing(ranks({"a": "1"}), ranks({"a": "1"}, {"a": "1"})) == ("2 ranks instead of 1",)


def test_long_lists_are_abbreviated() -> None:
    assert abbreviate(list("abcdefgh")) == "a, b, c, d, e and 3 more"
    assert abbreviate(["a"]) == "a"
