"""The rewards that come with the project. A sample's response is `sample.text`; a reference answer `prompt.answer`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from asyncrl.data.sample import Prompt, Sample


def exact_match(sample: Sample, prompt: Prompt, *, strip: bool = True, ignore_case: bool = False) -> float:
    """1 where the response is the answer, else 0."""
    response, answer = sample.text, _answer_of(prompt)
    if strip:
        response, answer = response.strip(), answer.strip()
    if ignore_case:
        response, answer = response.casefold(), answer.casefold()
    return float(response == answer)


def length(sample: Sample, prompt: Prompt, *, target: int) -> float:
    """1 for a response of `target` tokens, falling linearly to 0 at none and at twice as many."""
    return max(0.0, 1.0 - abs(len(sample.output_ids) - target) / target)


def math_verify(sample: Sample, prompt: Prompt) -> float:
    """1 where the last mathematical expression of the response equals the answer (symbolically), else 0.

    math-verify's own time limits are off: they count an expression that takes too long as wrong, and work by SIGALRM.
    The worker that runs this is ended at reward.timeout_s, and the sample counts as failed.
    """
    from math_verify import parse, verify

    answer = _answer_of(prompt)
    gold = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math_verify cannot read the reference answer {answer!r}")
    return float(verify(gold, parse(sample.text, parsing_timeout=None), timeout_seconds=None))


def reasoning_gym(sample: Sample, prompt: Prompt, *, task: str | None = None, answer_tag: str | None = None) -> float:
    """The task's own score in [0, 1] of the whole response, or of what stands in the last <answer_tag>…</answer_tag>.

    `task` is found in the record when it came from `reasoning_gym:TASK`; no tag means no answer, which scores as such.
    """
    from reasoning_gym.utils import extract_answer

    name = task or prompt.record.get("metadata", {}).get("source_dataset")
    if name is None:
        raise ValueError("the record names no reasoning_gym task; set reward.args.task")
    response = sample.text.strip() if answer_tag is None else extract_answer(sample.text, answer_tag)
    return float(_score_function(name)(response, prompt.record))


@cache
def _score_function(task: str) -> Callable[[str | None, dict[str, Any]], float]:
    from reasoning_gym import get_score_answer_fn

    score: Callable[[str | None, dict[str, Any]], float] = get_score_answer_fn(task)
    return score


def _answer_of(prompt: Prompt) -> str:
    if prompt.answer is None:
        raise ValueError("the prompt has no reference answer; set data.answer_key")
    return prompt.answer
