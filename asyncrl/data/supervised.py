"""Supervised examples for the warm-up: pairs of prompt and response, as the same RolloutBatch that rollouts have.

A response is encoded separately from its prompt, because generation also continues a prompt that is already encoded.
The end token closes it: in a chat, the one with which the chat template ends the assistant's turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from asyncrl.config.sections.data import DataConfig
from asyncrl.config.sections.training import WarmupConfig
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.fields import Record, required_field
from asyncrl.data.prompt_stream import PromptStream
from asyncrl.data.rendering.encoding import encoded_records
from asyncrl.data.rendering.findings import Findings
from asyncrl.data.rendering.renderer import PromptRenderer
from asyncrl.data.sample import Prompt, Sample, SampleGroup, Turn, VersionSpan
from asyncrl.data.sources import Progress, read_records
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.errors import DataError, ModelError, counted

log = structlog.get_logger(__name__)

SUPERVISED_VERSION = "data"
"""Weight version of tokens that come from data and not from weights."""


@dataclass(frozen=True, slots=True)
class SupervisedExample:
    """A tokenised prompt and the response to learn."""

    prompt: Prompt
    response_text: str
    """Response without the end token."""
    response_ids: NDArray[np.int32]
    """int32 [tokens], including the end token."""


class SupervisedStream:
    """Endless batches of examples, shuffled anew in each epoch. Batch n is the same in every run."""

    def __init__(self, examples: tuple[SupervisedExample, ...], *, batch_size: int, seed: int) -> None:
        self._examples = {example.prompt.prompt_id: example for example in examples}
        self._stream = PromptStream([example.prompt for example in examples], seed=seed, shuffle=True)
        self._batch_size = batch_size

    def __len__(self) -> int:
        """Number of examples in one epoch."""
        return len(self._examples)

    def next_batch(self, step: int) -> RolloutBatch:
        """Returns the next `batch_size` examples, with rewards of 1 and log-probs of 0. `step` is its rollout id."""
        groups = []
        for _ in range(self._batch_size):
            drawn = self._stream.draw()
            example = self._examples[drawn.prompt.prompt_id]
            length = len(example.response_ids)
            turn = Turn(
                example.prompt.token_ids,
                example.response_ids,
                np.zeros(length, np.float32),
                (VersionSpan(SUPERVISED_VERSION, 0, length),),
            )
            group_id = f"{drawn.ordinal:08d}"
            sample = Sample.of_turn(
                f"{group_id}.000", group_id, turn, finish_reason="stop", text=example.response_text, reward=1.0
            )
            groups.append(SampleGroup(sample.group_id, example.prompt, (sample,)))
        return RolloutBatch.from_groups(step, groups, temperature=1.0)


def load_supervised(
    config: WarmupConfig,
    data: DataConfig,
    tokenizer: PolicyTokenizer,
    *,
    context_length: int,
    progress: Progress | None = None,
) -> SupervisedStream:
    """Reads the examples of the warm-up; renders their prompts as `data` says. Blocks: call it in a thread.

    `progress` tells other threads how far it is.

    An example longer than `context_length` tokens is dropped, or refused with `data.overlong = "error"`. Raises
    DataError and ConfigError as `load_prompts` does, and ModelError when the model has no end token to teach.
    """
    where = "warmup"
    source = data.model_copy(
        update={"source": config.source, "args": config.args, "size": config.size, "split": None, "seed": config.seed}
    )
    source = source.model_copy(update={"answer_key": config.response_key})
    findings, progress = Findings(), progress or Progress()
    render = PromptRenderer(source, tokenizer, findings, where, settings="data")
    end_id = tokenizer.turn_end_id if render.chat else tokenizer.eos_token_id
    if end_id is None:
        raise ModelError(
            f"{tokenizer.source} names no end token (eos_token_id), so the warm-up cannot teach where a response ends"
        )
    end = np.array([end_id], np.int32)

    def respond(record: Record) -> str:
        response = required_field(record, config.response_key, where, "warmup.response_key")
        if not isinstance(response, str):
            found = type(response).__name__
            raise DataError(f'{where}: {record.place}: field "{config.response_key}" must be a string, found {found}')
        return response

    records = read_records(source, where=where, progress=progress)
    examples: list[SupervisedExample] = []
    dropped = 0
    for encoded in encoded_records(records, render, tokenizer, progress, respond=respond):
        record, target = encoded.record, encoded.response_ids
        if len(target) == 0 or target[-1] != end_id:  # a response may be written with its end
            target = np.concatenate([target, end])
        total = len(encoded.prompt_ids) + len(target)
        if total > context_length:
            dropped += 1
            if source.overlong == "error":
                raise DataError(
                    f"{where}: {record.place}: prompt and response have {total} tokens, "
                    f'over the context of {context_length}; shorten them, or set data.overlong = "drop"'
                )
            continue
        prompt = Prompt(record.record_id, encoded.prompt, encoded.prompt_ids, encoded.response, record.fields)
        examples.append(SupervisedExample(prompt, encoded.response, target))
    if not examples:
        reason = (
            f"{counted(dropped, 'example')} over {context_length} tokens, and no other"
            if dropped
            else "there are no records"
        )
        raise DataError(f"{where}.source: {config.source} holds no usable example: {reason}")
    if dropped:
        log.warning("over-long examples dropped", source=config.source, dropped=dropped, kept=len(examples))
    findings.tell(config.source)
    return SupervisedStream(tuple(examples), batch_size=config.batch_size, seed=config.seed)
