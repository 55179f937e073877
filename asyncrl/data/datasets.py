"""From records to tokenised prompts: checks the fields, renders, encodes, and handles prompts that are too long.

All records are checked before the first step, so a bad line ends the run at its start and not hours later. The price
is memory: about 0.5 kB per prompt beside its text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import structlog

from asyncrl.config.checks.named_code import is_generated
from asyncrl.config.sections.data import DataConfig
from asyncrl.data.fields import Record, required_field
from asyncrl.data.rendering.encoding import encoded_records
from asyncrl.data.rendering.findings import Findings
from asyncrl.data.rendering.renderer import PromptRenderer
from asyncrl.data.sample import Prompt
from asyncrl.data.sources import Progress, read_records
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.errors import DataError, counted

log = structlog.get_logger(__name__)

_GROUPED_NUMBER = re.compile(r"[^\d\s]?-?\d{1,3}(,\d{3})+(\.\d+)?")
_WORKED_SOLUTION = re.compile(r"\n\s*####\s*\S[^\n]*\s*\Z")


@dataclass(frozen=True, slots=True)
class PromptSet:
    """All usable prompts of a source."""

    prompts: tuple[Prompt, ...]
    """In the source's order."""
    dropped_overlong: int
    """Number of prompts left out because they leave no room for a response."""
    max_prompt_tokens: int
    """Length of the longest prompt that leaves room for a response."""


def load_prompts(
    config: DataConfig,
    tokenizer: PolicyTokenizer,
    *,
    max_prompt_tokens: int,
    where: str = "data",
    progress: Progress | None = None,
) -> PromptSet:
    """Reads, renders and encodes the prompts of `config`. Blocks: call it in a thread.

    `max_prompt_tokens` is the context length minus the longest response. `where` names the setting in messages, and
    `progress` tells other threads how far it is.
    Raises DataError for a missing, empty or malformed source or a missing field; ConfigError for a chat setting that
    the tokenizer does not support.
    """
    findings, progress = Findings(), progress or Progress()
    render = PromptRenderer(config, tokenizer, findings, where)
    records = read_records(config, where=where, progress=progress)
    prompts: list[Prompt] = []
    dropped = 0
    for encoded in encoded_records(records, render, tokenizer, progress):
        record, length = encoded.record, len(encoded.prompt_ids)
        if length > max_prompt_tokens:
            dropped += 1
            if config.overlong == "error":
                raise DataError(
                    f"{where}: {record.place}: {counted(length, 'token')}, and at most {max_prompt_tokens} leave "
                    f'room for a response; shorten it, lower max_new_tokens, or set {where}.overlong = "drop"'
                )
            continue
        answer = _answer(record, config, where, findings)
        prompts.append(Prompt(record.record_id, encoded.prompt, encoded.prompt_ids, answer, record.fields))
    if not prompts:
        reason = (
            f"{counted(dropped, 'prompt')} over {max_prompt_tokens} tokens, and no other"
            if dropped
            else "there are no records"
        )
        raise DataError(f"{where}.source: {config.source} holds no usable prompt: {reason}")
    if dropped:
        log.warning(
            "over-long prompts dropped",
            source=config.source,
            dropped=dropped,
            kept=len(prompts),
            max_prompt_tokens=max_prompt_tokens,
        )
    _look_at(prompts, config, findings)
    findings.tell(config.source)
    return PromptSet(tuple(prompts), dropped, max_prompt_tokens)


def _answer(record: Record, config: DataConfig, where: str, findings: Findings) -> str | None:
    if config.answer_key is None:
        return None
    value = required_field(record, config.answer_key, where, f"{where}.answer_key")
    if value is None:
        findings.add("prompts have no answer: it is null", record.place)
        return None
    if value == "":
        findings.add("prompts have an empty answer", record.place)
    if isinstance(value, dict | list | tuple):
        findings.add(
            f"answers are objects or lists, which the reward gets as JSON text; {where}.answer_key reaches into them "
            "with a path such as reward_model.ground_truth",
            record.place,
            f"{config.answer_key}.{next(iter(value), 0) if isinstance(value, dict) else 0}",
        )
    text = str(value) if isinstance(value, str | int | float) else msgspec.json.encode(value, enc_hook=str).decode()
    if config.answer_after is not None:
        return _answer_after(config.answer_after, text, f'{where}: {record.place}: field "{config.answer_key}"')
    if _WORKED_SOLUTION.search(text):
        what = f'answers are worked solutions that end with "#### …"; {where}.answer_after = "####" takes the end'
        findings.add(what, record.place)
    return text


def _answer_after(marker: str, text: str, where: str) -> str:
    _, found, answer = text.rpartition(marker)
    answer = answer.strip()
    if not found or not answer:
        raise DataError(f"{where} holds nothing after {marker!r}; take it out of the data, or unset answer_after")
    return answer.replace(",", "") if _GROUPED_NUMBER.fullmatch(answer) else answer


def _look_at(prompts: Sequence[Prompt], config: DataConfig, findings: Findings) -> None:
    """Finds what only all prompts together show."""
    answers = {prompt.answer for prompt in prompts}
    if len(prompts) > 1 and len(answers) == 1 and None not in answers:
        findings.add("all answers are the same", prompts[0].prompt_id, next(iter(answers)), count=len(prompts))
    if is_generated(config.source):
        return  # a task that draws at random repeats itself
    seen: set[int] = set()
    for prompt in prompts:
        key = hash(prompt.token_ids.tobytes())
        if key in seen:
            findings.add("prompts occur more than once", prompt.prompt_id)
        seen.add(key)
