from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import anyio
import pytest

from asyncrl.observability.events import EventLog
from asyncrl.tasks import Background
from asyncrl.weights import copy_file
from asyncrl.weights.copies import Copies
from tests.weights.fakes import ThreadSource

MakeCopies = Callable[..., Copies]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def events() -> EventLog:
    return EventLog(None)


@pytest.fixture
def source() -> Iterator[ThreadSource]:
    source = ThreadSource()
    yield source
    source.close()


@pytest.fixture
async def make_copies() -> AsyncIterator[MakeCopies]:
    """Called with a directory, and `needs_room`."""
    async with anyio.create_task_group() as task_group:
        yield partial(Copies, background=Background(task_group))
        task_group.cancel_scope.cancel()


@pytest.fixture
def disk_answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every write to a copy waits until it is set."""
    answers, write = threading.Event(), copy_file._write_all

    def hang(*arguments: Any) -> None:
        assert answers.wait(60)
        write(*arguments)

    monkeypatch.setattr(copy_file, "_write_all", hang)
    yield answers
    answers.set()
