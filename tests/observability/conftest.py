from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from blockbuster import BlockBuster, blockbuster_ctx


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def no_blocking() -> Iterator[BlockBuster]:
    """Makes any call that would block the event loop raise."""
    with blockbuster_ctx() as guard:
        yield guard
