"""Which copies of weights engines read, or may be told to read again: whoever writes copies leaves these alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from asyncrl.observability.waits import waiting

LOOK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Published:
    """The weights that engines serve."""

    version: str
    directory: Path | None
    """A copy in Hugging Face's format, where one was kept."""


async def is_there(directory: Path) -> bool:
    """Whether a copy exists, as far as its disk tells within `LOOK_TIMEOUT_S`; the event loop does not wait for it."""
    try:
        with waiting("look for a copy", f"the disk of {directory}", LOOK_TIMEOUT_S):
            return await anyio.to_thread.run_sync(directory.exists, abandon_on_cancel=True)
    except TimeoutError:
        return False


class CopiesInUse:
    """A directory is in use as often as it is held."""

    def __init__(self) -> None:
        self._held: Counter[Path] = Counter()

    @property
    def directories(self) -> frozenset[Path]:
        return frozenset(self._held)

    @contextmanager
    def held(self, directory: Path) -> Iterator[None]:
        self._held[directory] += 1
        try:
            yield
        finally:
            self._held[directory] -= 1
            if not self._held[directory]:
                del self._held[directory]
