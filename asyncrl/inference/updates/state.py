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

import anyio

from asyncrl.data.fleet import UpdateLease
from asyncrl.inference.updates.copies_in_use import Published
from asyncrl.inference.updates.leases import LeaseBook
from asyncrl.tasks import Changes


class UpdateState:
    """The publications to one fleet, as they stand."""

    def __init__(self) -> None:
        self.published: Published | None = None
        """What engines serve; None before the first publication."""
        self.book = LeaseBook()
        self.lock = anyio.Lock()
        self.ends = 0
        """Leases that ended, their engines settled, and updates that did not come to one."""
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

    def signal_end(self) -> None:
        """Makes engines that wait for weights look again how they can get them."""
        self.ends += 1
        self._changes.notify()

    async def next_end(self, after: int) -> None:
        """Returns when more than `after` leases have ended and none is open; each lease has a deadline."""
        while self.book.open is not None or self.ends <= after:
            await self._changes.wait()
