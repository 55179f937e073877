"""Copies of weights that engines read, or may have to read again. Whatever is in use stays as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from asyncrl.observability.waits import waiting

LOOK_TIMEOUT_S = 30.0
"""Longest wait for a disk that is asked whether a copy exists."""


@dataclass(frozen=True, slots=True)
class Published:
    """The weights that engines serve."""

    version: str
    directory: Path | None
    """A copy in Hugging Face's format; None where there is none, or none any more."""
    copy_due: float | None = None
    """When the publisher will have told how the writing of the copy ended (anyio.current_time); None: it is complete,
    or there is none."""


async def is_there(directory: Path) -> bool:
    """Whether a copy exists. False where its disk does not tell within `LOOK_TIMEOUT_S`; the event loop goes on."""
    try:
        with waiting("look for a copy", f"the disk of {directory}", LOOK_TIMEOUT_S):
            return await anyio.to_thread.run_sync(directory.exists, abandon_on_cancel=True)
    except TimeoutError:
        return False


class CopiesInUse:
    """Counts the holders of each directory: engines that load it, and evaluations that are pinned to it."""

    def __init__(self) -> None:
        self._held: Counter[Path] = Counter()

    @property
    def directories(self) -> frozenset[Path]:
        """Every directory that somebody holds."""
        return frozenset(self._held)

    @contextmanager
    def held(self, directory: Path) -> Iterator[None]:
        """Holds `directory` within the block."""
        self._held[directory] += 1
        try:
            yield
        finally:
            self._held[directory] -= 1
            if not self._held[directory]:
                del self._held[directory]
