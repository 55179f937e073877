"""From records to tokenised prompts: checks the fields, renders, encodes, and handles prompts that are too long.

All records are checked before the first step, so a bad line ends the run at its start and not hours later. The price
is memory: about 0.5 kB per prompt beside its text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from asyncrl.config.sections.data import DataConfig
from asyncrl.data.sample import Prompt
from asyncrl.data.sources import Record, read_records
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.errors import ConfigError, DataError

log = structlog.get_logger(__name__)

_CHUNK = 512  # prompts per tokenizer call


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
    config: DataConfig, tokenizer: PolicyTokenizer, *, max_prompt_tokens: int, where: str = "data"
) -> PromptSet:
    """Reads, renders and encodes the prompts of `config`. Blocks: call it in a thread.

    `max_prompt_tokens` is the context length minus the longest response. `where` names the setting in messages.
    Raises DataError for a missing, empty or malformed source or a missing field; ConfigError for a chat setting that
    the tokenizer does not support.
    """
    render = prompt_renderer(config, tokenizer, where)
    prompts: list[Prompt] = []
    dropped = 0
    for chunk in chunks(read_records(config, where=where), _CHUNK):
        texts = [render(record) for record in chunk]
        encoded = tokenizer.encode(texts, add_special_tokens=not tokenizer.uses_chat_template(config.chat_template))
        for record, text, ids in zip(chunk, texts, encoded, strict=True):
            if len(ids) == 0:
                raise DataError(f"{where}: {record.place}: the prompt is empty")
            if len(ids) > max_prompt_tokens:
                dropped += 1
                if config.overlong == "error":
                    raise DataError(
                        f"{where}: {record.place}: {len(ids)} tokens, and at most {max_prompt_tokens} leave "
                        f'room for a response; shorten it, lower max_new_tokens, or set {where}.overlong = "drop"'
                    )
                continue
            prompts.append(Prompt(record.record_id, text, ids, _answer(record, config, where), record.fields))
    if not prompts:
        reason = (
            f"all {dropped} prompts are longer than {max_prompt_tokens} tokens" if dropped else "there are no records"
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
    return PromptSet(tuple(prompts), dropped, max_prompt_tokens)


def prompt_renderer(config: DataConfig, tokenizer: PolicyTokenizer, where: str) -> Callable[[Record], str]:
    """Returns the function that renders a record as text: through the chat template, or unchanged.

    Raises ConfigError for a chat setting that the tokenizer does not support. The returned function raises DataError
    for a record that it cannot render.
    """
    chat = tokenizer.uses_chat_template(config.chat_template)
    if config.system_prompt is not None and not chat:
        raise ConfigError(
            f"{where}.system_prompt is set, but prompts are rendered as plain text; set {where}.chat_template = true"
        )
    system = [] if config.system_prompt is None else [{"role": "system", "content": config.system_prompt}]

    def render(record: Record) -> str:
        value = required_field(record, config.prompt_key, where, "prompt_key")
        if isinstance(value, str):
            return tokenizer.render_chat([*system, {"role": "user", "content": value}]) if chat else value
        defect = _defect_of_messages(value)
        if defect is not None:
            raise DataError(
                f'{where}: {record.place}: field "{config.prompt_key}" must be a string or a list of chat messages, '
                f"but {defect}" + ("" if isinstance(value, list) else f"; set {where}.prompt_key")
            )
        if not chat:
            raise DataError(
                f'{where}: {record.place}: field "{config.prompt_key}" holds chat messages, but prompts are '
                "rendered as plain text: use a tokenizer with a chat template, or give the prompt as a string"
            )
        return tokenizer.render_chat([*system, *value])

    return render


def required_field(record: Record, key: str, where: str, setting: str) -> Any:
    """Returns field `key`; raises DataError, which lists the fields of the record, if it is missing."""
    if key not in record.fields:
        found = ", ".join(map(str, record.fields)) or "nothing"
        raise DataError(f'{where}: {record.place}: field "{key}" is missing (found: {found}); set {where}.{setting}')
    return record.fields[key]


def chunks(records: Iterable[Record], size: int) -> Iterator[list[Record]]:
    """Yields consecutive lists of at most `size` records."""
    iterator = iter(records)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


def _answer(record: Record, config: DataConfig, where: str) -> str | None:
    if config.answer_key is None:
        return None
    value = required_field(record, config.answer_key, where, "answer_key")
    if value is None or isinstance(value, str):
        return value
    return str(value) if isinstance(value, int | float) else msgspec.json.encode(value, enc_hook=str).decode()


def _defect_of_messages(value: Any) -> str | None:
    """Why `value` is not a list of chat messages: `message 1 has no `content` (found: role)`. None if it is one."""
    if not isinstance(value, list):
        return f"it is {type(value).__name__}"
    if not value:
        return "it is an empty list"
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            return f"message {number} is {type(message).__name__}, not an object with `role` and `content`"
        for name in ("role", "content"):
            if name not in message:
                return f"message {number} has no `{name}` (found: {', '.join(map(str, message)) or 'nothing'})"
        if not isinstance(message["role"], str):
            return f"the `role` of message {number} is {type(message['role']).__name__}, not a string"
    return None
