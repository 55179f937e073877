"""The scheduler of a scripted engine: it does one thing at a time, and nothing while it is frozen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from asyncrl.tasks import Changes


class Scheduler:
    """The scheduler of one life of an engine."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._frozen = False
        self._changes = Changes()

    def freeze(self) -> None:
        """Begins no further turn until `thaw`."""
        self._frozen = True

    def thaw(self) -> None:
        """Goes on after `freeze`."""
        self._frozen = False
        self._changes.notify()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits until the scheduler is free and not frozen, and keeps it busy during the body."""
        await self._until_thawed()
        async with self._lock:
            await self._until_thawed()
            yield

    async def _until_thawed(self) -> None:
        while self._frozen:
            await self._changes.wait()
