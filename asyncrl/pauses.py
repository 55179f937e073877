"""The executor hears of each update of the weights: where fleet and executor of a job meet.

What runs goes on until all is ready for the new weights; only then requests do what weights.on_update says and engines
are paused. Nothing is sent before the executor knows which weights it is sent under.

Invariant: an update that the executor was told of ends for it, however it does; its clock never stands still for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from asyncrl import interpreter
from asyncrl.weights.publication import Fleet

if TYPE_CHECKING:  # torch stays out of the driver until the engines are on their way
    from asyncrl.data.fleet import FleetView, UpdateAck, UpdateLease


class ServingFleet(Fleet, Protocol):
    """A `Fleet` that tells how its engines are; an `InferenceController` is one."""

    def fleet(self) -> FleetView: ...


class Executor(Protocol):
    """Who is told; a `RolloutExecutor` is one."""

    def updating(self) -> AbstractAsyncContextManager[None]: ...

    def engines_paused(self) -> None: ...

    def engines_resumed(self) -> None: ...

    def set_weight_version(self, version: str) -> None: ...


class ToldFleet:
    """A fleet as the weight plane sees it, whose updates are told to the executor.

    A pause is told from the moment in which it is asked for: an update that waits for engines which are being started
    again finds too few of them at work to hold requests to their deadlines.
    """

    def __init__(self, fleet: ServingFleet, executor: Executor, *, tell_version: bool = True) -> None:
        """Without `tell_version` engines cannot serve the new weights at once, and the loop tells of them later."""
        self._fleet = fleet
        self._executor = executor
        self._tell_version = tell_version
        self._version = ""
        self._update = AsyncExitStack()
        """What the end of the update in progress undoes."""

    def copies_in_use(self) -> frozenset[Path]:
        """As the fleet says."""
        return self._fleet.copies_in_use()

    def copy_written(self, directory: Path, complete: bool) -> None:
        """Passed on to the fleet."""
        self._fleet.copy_written(directory, complete)

    async def begin_weight_update(self, version: str) -> UpdateLease:
        async with AsyncExitStack() as update:  # undone here where it does not begin, or is cancelled
            if self._fleet.fleet().serves:  # else requests in flight would not end before it
                await update.enter_async_context(self._executor.updating())
            update.callback(self._executor.engines_resumed)
            self._executor.engines_paused()
            lease = await self._fleet.begin_weight_update(version)
            self._version, self._update = version, update.pop_all()
        interpreter.tidy()
        return lease

    async def commit_weight_update(
        self, lease_id: str, acks: Sequence[UpdateAck], directory: Path | None, *, copy_due: float | None = None
    ) -> None:
        """Commits, and tells the executor the version and the end of the update."""
        await self._fleet.commit_weight_update(lease_id, acks, directory, copy_due=copy_due)
        if self._tell_version:
            self._executor.set_weight_version(self._version)
        await self._update.aclose()

    async def abort_weight_update(self, lease_id: str, failed: Mapping[str, str], *, untouched: bool) -> None:
        try:
            await self._fleet.abort_weight_update(lease_id, failed, untouched=untouched)
        finally:
            await self._update.aclose()
