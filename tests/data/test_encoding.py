"""Records are rendered while the tokenizer encodes the ones before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from asyncrl.data.fields import Record
from asyncrl.data.rendering import encoding
from asyncrl.data.rendering.encoding import encoded_records
from asyncrl.data.sources import Progress
from asyncrl.errors import DataError

RECORDS = [Record(f"a:{i}", f"a line {i}", {"prompt": str(i)}) for i in range(10)]


def renderer(render: Callable[[Record], str]) -> Any:
    class Renderer:
        chat, where = True, "data"

        def __call__(self, record: Record) -> str:
            return render(record)

    return Renderer()


class Tokenizer:
    """Encodes only after the first record of the next chunk was rendered."""

    def __init__(self, rendered: threading.Event) -> None:
        self._rendered = rendered

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Any]:
        assert self._rendered.wait(10), "nothing was rendered meanwhile"
        return [np.array([int(text)], np.int32) if text else np.empty(0, np.int32) for text in texts]


def test_rendering_goes_on_while_the_tokenizer_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_CHUNK", 4)
    second_chunk, progress = threading.Event(), Progress()

    def render(record: Record) -> str:
        if record is RECORDS[4]:
            second_chunk.set()
        return str(record.fields["prompt"])

    tokenizer: Any = Tokenizer(second_chunk)
    encoded = list(encoded_records(RECORDS, renderer(render), tokenizer, progress))
    assert [e.record for e in encoded] == RECORDS and [int(e.prompt_ids[0]) for e in encoded] == list(range(10))
    assert progress.ready == 10


def test_an_empty_prompt_is_named() -> None:
    ready = threading.Event()
    ready.set()
    tokenizer: Any = Tokenizer(ready)
    with pytest.raises(DataError, match="data: a line 3: the prompt is empty"):
        list(encoded_records(RECORDS, renderer(lambda r: "" if r is RECORDS[3] else "1"), tokenizer, Progress()))
