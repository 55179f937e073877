"""The reward of the small-model recipe, and an example of one's own: is the last number of a response the answer?

It reads numbers and evaluates nothing: a response that only repeats the sum (`4 - 1`) is not worth its value.
"""

from __future__ import annotations

import re

from asyncrl.data.sample import Prompt, Sample

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")


def last_number(sample: Sample, prompt: Prompt) -> float:
    """1 where the last number in the response equals the reference answer, else 0; raises ValueError without one."""
    if prompt.answer is None:
        raise ValueError("the prompt has no reference answer; set data.answer_key")
    numbers = _NUMBER.findall(sample.text.replace("−", "-"))
    return float(bool(numbers) and float(numbers[-1]) == float(prompt.answer))
