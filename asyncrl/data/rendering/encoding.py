"""From records to token ids: the next records are read and rendered while the tokenizer encodes the ones before.

Reading and rendering are Python, in the calling thread. Encoding is not: it leaves the interpreter to the other thread
and takes all cores that are idle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.data.fields import Record
from asyncrl.data.rendering.renderer import PromptRenderer
from asyncrl.data.sources import Progress
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.errors import DataError

_CHUNK = 512  # records per tokenizer call

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """A record, and the texts that were made of it."""

    record: Record
    prompt: str
    prompt_ids: Ids
    """int32 [tokens], at least one."""
    response: str
    """The response to learn; empty where there is none."""
    response_ids: Ids
    """int32 [tokens], without the end token."""


def encoded_records(
    records: Iterable[Record],
    render: PromptRenderer,
    tokenizer: PolicyTokenizer,
    progress: Progress,
    *,
    respond: Callable[[Record], str] = lambda record: "",
) -> Iterator[EncodedRecord]:
    """Renders and encodes the prompts of `records`, in order, and what `respond` returns; counts them in `progress`.

    Raises DataError for a record that cannot be rendered, or whose prompt is empty.
    """

    def encode(chunk: _Chunk) -> Iterator[EncodedRecord]:
        prompts = tokenizer.encode(chunk.prompts, add_special_tokens=not render.chat)
        responses = tokenizer.encode(chunk.responses, add_special_tokens=False)
        return map(EncodedRecord, chunk.records, chunk.prompts, prompts, chunk.responses, responses)

    def finished(encoding: Future[Iterator[EncodedRecord]]) -> Iterator[EncodedRecord]:
        for encoded in encoding.result():
            if len(encoded.prompt_ids) == 0:
                raise DataError(f"{render.where}: {encoded.record.place}: the prompt is empty")
            progress.ready += 1
            yield encoded

    iterator, before = iter(records), None
    with ThreadPoolExecutor(1, "asyncrl-encode") as thread:
        while chunk := list(itertools.islice(iterator, _CHUNK)):
            rendered = _Chunk(chunk, [render(record) for record in chunk], [respond(record) for record in chunk])
            encoding = thread.submit(encode, rendered)
            if before is not None:
                yield from finished(before)
            before = encoding
        if before is not None:
            yield from finished(before)


@dataclass(frozen=True, slots=True)
class _Chunk:
    records: list[Record]
    prompts: list[str]
    responses: list[str]
