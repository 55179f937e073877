"""Pauses: when the engines generate nothing, and who hears of it.

Two things pause the engines: an update of their weights (`ToldFleet`), and the trainer's turn on GPUs that engines
share with it (`turns.py`). Both say so here, and every executor in front of the engines hears of it.

    update of the weights     |-----|        |----------|
    trainer's turn                               |----------------|
    the executors' clock  runs| still | runs | still              | runs

Invariants
- Executors hear of a pause when the first of overlapping pauses begins, and of its end when the last of them ends. The
  owner of a pause ends it however the work in it ends, so the clock of an executor never stands still for good.
- Executors hear of new weights before the pause ends. No request is sent before its executor knows under which weights.
- Requests in flight go on until all is ready for the update of the weights; only then they do what `weights.on_update`
  says, and the pause begins.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.data.fleet import UpdateAck, UpdateLease
from asyncrl.run import interpreter
from asyncrl.run.parts import EngineUser
from asyncrl.tasks import run_all

if TYPE_CHECKING:
    from asyncrl.run.parts import ServingFleet


class Pause:
    """One reason for which the engines generate nothing."""

    def __init__(self, pauses: Pauses, reason: str) -> None:
        self.reason = reason
        self._pauses = pauses

    def end(self) -> None:
        """The engines need not wait for this any more. Idempotent."""
        self._pauses._end(self)


class Pauses:
    """The owner of all pauses of the engines that are trained; see the module's docstring."""

    def __init__(self) -> None:
        self._executors: list[EngineUser] = []
        self._pauses: list[Pause] = []
        self._version: str | None = None
        """The weights under which engines go on, or will after the pause."""
        self._version_is_news = False

    def add(self, executor: EngineUser) -> None:
        """From now on `executor` hears of pauses and weights, also of the present ones. Idempotent."""
        if any(known is executor for known in self._executors):
            return
        self._executors.append(executor)
        if self._version is not None and not self._version_is_news:
            executor.set_weight_version(self._version)
        if self._pauses:
            executor.engines_paused()

    def begin(self, reason: str) -> Pause:
        """The engines generate nothing from now on, until the caller ends the pause."""
        pause = Pause(self, reason)
        self._pauses.append(pause)
        if len(self._pauses) == 1:
            for executor in self._executors:
                executor.engines_paused()
        return pause

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the engines generate nothing now; empty where they may."""
        return tuple(pause.reason for pause in self._pauses)

    @asynccontextmanager
    async def update(self, *, requests_end: bool) -> AsyncIterator[None]:
        """Enter it around an update of the weights.

        `requests_end`: engines serve, so that requests in flight can do what `weights.on_update` says before the pause.
        """
        async with AsyncExitStack() as updating:
            if requests_end:  # of all executors at once: their waits do not add up
                await run_all(*(partial(updating.enter_async_context, e.updating()) for e in self._executors))
            pause = self.begin("update of the weights")
            try:
                yield
            finally:
                pause.end()

    def serve(self, version: str) -> None:
        """The engines hold weights `version`. Executors hear of it when the last pause ends."""
        self._version, self._version_is_news = version, True
        if not self._pauses:
            self._tell_version()

    def _end(self, pause: Pause) -> None:
        if pause not in self._pauses:
            return
        self._pauses.remove(pause)
        if not self._pauses:
            self._tell_version()
            for executor in self._executors:
                executor.engines_resumed()

    def _tell_version(self) -> None:
        if self._version is not None and self._version_is_news:
            self._version_is_news = False
            for executor in self._executors:
                executor.set_weight_version(self._version)


class ToldFleet:
    """A fleet as the weight plane sees it, whose updates are pauses for the executors.

    A pause begins in the moment in which it is asked for: an update that waits for engines which are being started
    again finds too few of them at work to hold requests to their deadlines.
    """

    def __init__(self, fleet: ServingFleet, pauses: Pauses) -> None:
        self._fleet = fleet
        self._pauses = pauses
        self._version = ""
        self._update = AsyncExitStack()
        """What the end of the update in progress undoes."""

    def copies_in_use(self) -> frozenset[Path]:
        """Directories of copies that are to stay as they are."""
        return self._fleet.copies_in_use()

    async def begin_weight_update(self, version: str) -> UpdateLease:
        """Tells the executors, then begins; an update that does not begin is no pause."""
        async with AsyncExitStack() as update:
            # Where no engine serves, requests in flight would not end before the update.
            await update.enter_async_context(self._pauses.update(requests_end=self._fleet.fleet().serves))
            lease = await self._fleet.begin_weight_update(version)
            self._version, self._update = version, update.pop_all()
        interpreter.tidy()
        return lease

    def copy_written(self, directory: Path, complete: bool) -> None:
        """Passed on to the fleet."""
        self._fleet.copy_written(directory, complete)

    async def commit_weight_update(
        self, lease_id: str, acks: Sequence[UpdateAck], directory: Path | None, *, copy_due: float | None = None
    ) -> None:
        """Commits and ends the pause. A commit that fails leaves the pause to the abort that follows."""
        await self._fleet.commit_weight_update(lease_id, acks, directory, copy_due=copy_due)
        self._pauses.serve(self._version)
        await self._update.aclose()

    async def abort_weight_update(self, lease_id: str, failed: Mapping[str, str], *, untouched: bool) -> None:
        """Gives the engines back and ends the pause, whatever comes of the abort."""
        try:
            await self._fleet.abort_weight_update(lease_id, failed, untouched=untouched)
        finally:
            await self._update.aclose()
