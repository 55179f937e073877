"""An event loop whose clock runs `SPEED` times as fast: deadlines as they are by default, tested in seconds.

What is real (sockets, the machine) then seems slower by as much, so this is for deadlines that are long against it.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import Any

SPEED = 8.0


class _Selector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout if timeout is None or timeout <= 0 else timeout / SPEED)


class FastLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__(_Selector())

    def time(self) -> float:
        return time.monotonic() * SPEED


FAST_BACKEND: tuple[str, dict[str, Any]] = ("asyncio", {"loop_factory": FastLoop})
"""What the fixture `anyio_backend` of a test module returns, for its tests to run on that clock."""
