"""The last number of a response decides; the reward evaluates nothing."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.data.sample import Prompt, Sample, Turn
from asyncrl.demo.arithmetic import last_number


def reward(response: str, answer: str | None) -> float:
    ids = np.zeros(1, np.int32)
    turn = Turn(ids, ids, np.zeros(1, np.float32), ())
    sample = Sample.of_turn("s", "g", turn, finish_reason="stop", text=response)
    return last_number(sample, Prompt("p", "", ids, answer))


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("3", "3"),
        ("The answer is 3.", "3"),
        ("4 - 1 = 3", "3"),
        ("5 - 9 equals -4", "-4"),
        ("**-4**", "-4"),
        ("3.0", "3"),
    ],
)
def test_a_right_last_number_is_worth_one(response: str, answer: str) -> None:
    assert reward(response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("4 - 1", "3"),
        ("3 is not 4", "3"),
        ("-3", "3"),
        ("13", "3"),
        ("", "3"),
        ("three", "3"),
        ("x3", "3"),
        ("0.3", "3"),
    ],
)
def test_anything_else_is_worth_nothing(response: str, answer: str) -> None:
    assert reward(response, answer) == 0.0


def test_a_prompt_without_an_answer_is_a_failure_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="answer_key"):
        reward("3", None)
