from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from asyncrl.observability.events import EventLog
from tests.weights.fakes import ThreadSource


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
