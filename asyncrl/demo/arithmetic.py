"""The reward of the SmolLM2 recipe, and an example of a user's own reward: is the last number in a response the answer?

The reward only reads numbers and evaluates nothing: a response that repeats the problem (`4 - 1`) does not count as 3.
"""

from __future__ import annotations

import re

from asyncrl.data.sample import Prompt, Sample

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")


def last_number(sample: Sample, prompt: Prompt) -> float:
    """Returns 1 if the last number in the response equals the reference answer, else 0.

    Raises ValueError for a prompt without a reference answer.
    """
    if prompt.answer is None:
        raise ValueError("the prompt has no reference answer; set data.answer_key")
    numbers = _NUMBER.findall(sample.text.replace("−", "-"))
    return float(bool(numbers) and float(numbers[-1]) == float(prompt.answer))
