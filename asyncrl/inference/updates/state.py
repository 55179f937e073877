"""The state of the publications to one fleet: the published weights, the open update, the tasks that wait for its end.

`WeightUpdates` changes it; `CatchUp` and `Memory` act by it.

Invariants
- While a task holds `lock`, no update begins, commits or is given up.
- An update is counted as `beginning` before its first await, so that no engine starts to load weights that are about to
  be old. It leads to a lease, or to an end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import anyio

from asyncrl.data.fleet import UpdateLease
from asyncrl.errors import EngineError
from asyncrl.inference.updates.copies_in_use import Published
from asyncrl.inference.updates.leases import LeaseBook
from asyncrl.observability.waits import waiting
from asyncrl.tasks import Changes

COPY_MARGIN_S = 10.0
"""For the publisher's own word, after the time by which a copy is due."""


class UpdateState:
    """The publications to one fleet, as they stand."""

    def __init__(self) -> None:
        self.published: Published | None = None
        """What engines serve; None before the first publication."""
        self.book = LeaseBook()
        self.lock = anyio.Lock()
        self.ends = 0
        """Occasions for an engine to look for weights: leases that ended, their engines settled; updates that did not
        come to one; copies that were written or given up; memory that came back."""
        self._beginning = 0
        self._changes = Changes()

    @property
    def version(self) -> str | None:
        """The published version; None before the first publication."""
        return None if self.published is None else self.published.version

    @property
    def open_lease(self) -> UpdateLease | None:
        """The lease under which engines take weights now, if there is one."""
        return self.book.open

    @property
    def under_way(self) -> bool:
        """Whether an update is open or about to begin."""
        return self._beginning > 0 or self.book.open is not None

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """An update is about to get a lease; if the body raises, it does not come to one."""
        self._beginning += 1
        try:
            yield
        except BaseException:  # a cancellation too: engines that were left to this update look for a copy again
            self.signal_end()
            raise
        finally:
            self._beginning -= 1

    def copy_written(self, directory: Path, complete: bool) -> None:
        """The copy in `directory` is complete, or was given up. Does nothing for one that nobody waits for any more."""
        published = self.published
        if published is not None and published.directory == directory and published.copy_due is not None:
            self.published = replace(published, directory=directory if complete else None, copy_due=None)
            self.signal_end()

    async def wait_copy(self) -> None:
        """Returns when no copy of the published weights is being written; raises EngineError for one that is late."""
        published = self.published
        if published is None or published.copy_due is None:
            return
        timeout_s = max(0.0, published.copy_due - anyio.current_time()) + COPY_MARGIN_S
        try:
            with waiting(f"copy of weights {published.version}", f"the disk of {published.directory}", timeout_s):
                while self.published is not None and self.published.copy_due is not None:
                    await self._changes.wait()
        except TimeoutError as error:
            raise EngineError(str(error)) from error

    def signal_end(self) -> None:
        """Makes engines that wait for weights look again how they can get them."""
        self.ends += 1
        self._changes.notify()

    async def next_end(self, after: int) -> None:
        """Returns when more than `after` leases have ended and none is open; each lease has a deadline."""
        while self.book.open is not None or self.ends <= after:
            await self._changes.wait()
