"""Finishes what a cancellation must not leave half done, within bounds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import anyio.lowlevel

T = TypeVar("T")


async def finish_despite_cancellation(
    call: Callable[[], Awaitable[T]], *, grace_s: float, on_cancel: Callable[[], None] | None = None
) -> T:
    """Awaits `call()`. A cancellation from outside calls `on_cancel` at once, and interrupts `call` after `grace_s`.

    If `call` ends between the two, its result or error is dropped, and the cancellation goes on.
    """
    values: list[T] = []
    errors: list[Exception] = []
    scope = anyio.CancelScope(shield=True)

    async def watch_for_cancellation() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            if not ended:
                scope.deadline = anyio.current_time() + grace_s
                if on_cancel is not None:
                    on_cancel()

    ended = False
    async with anyio.create_task_group() as task_group:
        task_group.start_soon(watch_for_cancellation)
        with scope:
            try:
                values.append(await call())
            except Exception as error:  # raised below, outside the task group, which would wrap it in a group
                errors.append(error)
        ended = True
        task_group.cancel_scope.cancel()
    await anyio.lowlevel.checkpoint_if_cancelled()
    if errors:
        raise errors[0]
    return values[0]
