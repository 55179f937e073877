"""Ends several things at once, each of them whatever becomes of the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio


async def end_all(*ends: Callable[[], Awaitable[None]]) -> None:
    """Returns when all have ended; raises the first error of theirs then."""
    errors: list[Exception] = []

    async def one(end: Callable[[], Awaitable[None]]) -> None:
        try:
            await end()
        except Exception as error:  # of any kind: raised once the others have ended
            errors.append(error)

    async with anyio.create_task_group() as task_group:
        for end in ends:
            task_group.start_soon(one, end)
    if errors:
        raise errors[0]
