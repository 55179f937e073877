"""What a user should know of data that can be used: counted while they are read, told once at the end."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Finding:
    first: str
    example: str | None
    count: int = 0


class Findings:
    """Counts what was found in the records of one source."""

    def __init__(self) -> None:
        self._found: dict[str, _Finding] = {}

    def add(self, what: str, place: str, example: str | None = None, *, count: int = 1) -> None:
        """`what` is true of so many more records. `place` and `example` are told of the first of them."""
        self._found.setdefault(what, _Finding(place, example)).count += count

    def tell(self, source: str) -> None:
        """Logs one warning for each thing that was found."""
        for what, finding in self._found.items():
            example = {} if finding.example is None else {"example": finding.example}
            log.warning(what, count=finding.count, first=finding.first, **example, source=source)
