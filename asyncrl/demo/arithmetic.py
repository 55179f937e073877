"""The reward of the arithmetic recipe."""

from __future__ import annotations

import re

from asyncrl.data.sample import Prompt, Sample

_NUMBER = re.compile(r"-?\d+")


def last_number(sample: Sample, prompt: Prompt) -> float:
    """1 where the last whole number of the response is the reference answer, else 0."""
    numbers = _NUMBER.findall(sample.text)
    return float(bool(numbers) and prompt.answer is not None and int(numbers[-1]) == int(prompt.answer))
