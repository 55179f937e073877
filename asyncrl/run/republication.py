"""Republication: weights that every engine has lost are published again, beside a loop that waits for engines.

Where all engines ended between two publications and none can load a copy, nothing in the fleet brings them back. The
trainer has the weights, and it is idle while the loop waits for engines. The version says which weights they are:
it is the same as before where the trainer trained nothing since.

Invariants
- Weights are published here only while the loop is in `during`. So the loop and this task never use the trainer at
  once.
- A publication that was begun is finished before the loop goes on, also where the work beside it has failed: on shared
  GPUs half a publication would leave engines without memory.
- A publication that fails ends the loop's wait with its error. The next wait tries again.
- A publication that changes nothing is not tried again in the same wait, so the event loop is not kept busy with it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import anyio

from asyncrl.errors import AsyncRLError
from asyncrl.observability.waits import WAITS
from asyncrl.tasks import Changes

if TYPE_CHECKING:
    from asyncrl.run.parts import InferencePart

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Wait:
    """The loop waits for engines."""

    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    error: AsyncRLError | None = None
    """Of the publication that failed meanwhile."""


class Republication:
    """See the module's docstring. `serve` runs as a background task of the job."""

    def __init__(
        self, engines: InferencePart, publish: Callable[[], Awaitable[object]], note: Callable[[str], None]
    ) -> None:
        """`publish` publishes the trainer's weights; `note` shows a line to the person who runs the job."""
        self._engines = engines
        self._publish = publish
        self._note = note
        self._wait: _Wait | None = None
        self._publishing = False
        self._changes = Changes()

    async def during(self, work: Callable[[], Awaitable[T]]) -> T:
        """Awaits `work`, which waits for engines; if all engines lose their weights meanwhile, they get them again.

        Raises what `work` raises, and AsyncRLError of a publication that fails.
        """
        self._wait = wait = _Wait()
        self._changes.notify()
        try:
            with wait.scope:
                result = await work()
        finally:
            self._wait = None
            if self._publishing:
                with WAITS.register("end of the publication", "engines that had lost their weights", math.inf):
                    while self._publishing:
                        await self._changes.wait()
        if wait.error is not None:
            raise wait.error
        return result

    async def serve(self) -> None:
        """Publishes whenever that is needed and the loop waits for engines; never returns."""
        tried: _Wait | None = None
        while True:
            await self._engines.wait_publication_needed()
            while (wait := self._wait) is None or wait is tried:
                await self._changes.wait()
            if not self._engines.fleet().needs_publication:  # the loop has published meanwhile
                continue
            await self._publish_in(wait)
            tried = wait if self._engines.fleet().needs_publication else None

    async def _publish_in(self, wait: _Wait) -> None:
        self._note("no engine holds the weights any more, and no copy was kept: they are published again")
        self._publishing = True
        try:
            await self._publish()
        except AsyncRLError as error:
            wait.error = error
            wait.scope.cancel()
        finally:
            self._publishing = False
            self._changes.notify()
