"""Several things at once: ended whatever becomes of the others, or awaited until one fails, or until one has come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from asyncrl.errors import EngineError

Act = Callable[[], Awaitable[None]]


async def end_all(*ends: Act) -> None:
    """Returns when all have ended; raises the first error of theirs then."""
    errors: list[Exception] = []

    async def one(end: Act) -> None:
        try:
            await end()
        except Exception as error:  # of any kind: raised once the others have ended
            errors.append(error)

    async with anyio.create_task_group() as task_group:
        for end in ends:
            task_group.start_soon(one, end)
    if errors:
        raise errors[0]


async def await_all(*waits: Act) -> None:
    """Returns when all have; raises the first EngineError as it is, and waits for nobody else then."""
    errors: list[EngineError] = []

    async def one(wait: Act) -> None:
        try:
            await wait()
        except EngineError as error:
            errors.append(error)
            task_group.cancel_scope.cancel()

    async with anyio.create_task_group() as task_group:
        for wait in waits:
            task_group.start_soon(one, wait)
    if errors:
        raise errors[0]


async def await_any(*waits: Act) -> None:
    """Returns when one of them has; the others are cancelled. None of them may fail."""

    async def one(wait: Act) -> None:
        await wait()
        task_group.cancel_scope.cancel()

    async with anyio.create_task_group() as task_group:
        for wait in waits:
            task_group.start_soon(one, wait)
