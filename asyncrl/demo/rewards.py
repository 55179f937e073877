"""A reward of your own: called for each sample, in a process of its own unless it is async."""

from __future__ import annotations

from asyncrl.data.sample import Prompt, Sample


def score(sample: Sample, prompt: Prompt) -> float:
    """Returns 1 where the response is the reference answer, else the share of characters at their right place."""
    answer, response = prompt.answer or "", sample.text.strip()
    right = sum(a == b for a, b in zip(answer, response, strict=False))
    return 1.0 if response == answer else 0.5 * right / max(len(answer), len(response), 1)
