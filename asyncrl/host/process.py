"""What rank 0 and the host tell each other: process descriptions and exits, in JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

INHERITED = ""
"""As a log path: the process writes where its guardian would, to the same terminal or file."""

MAX_LINE_BYTES = 4 << 20
"""A longer line cannot be meant: on Linux an environment and a command line take less than 2 MiB together."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process that is to be started."""

    name: str
    """Unique among the live processes of the host: `engine-0`, `router`."""
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    """Added to the host's environment, which is that of rank 0 at the start of the host."""
    log_path: str = "/dev/null"
    """stdout and stderr are appended to this file; `INHERITED`: no file."""
    log_bytes: int = 64 << 20
    """When the file is larger, it becomes `log_path.1` in place of an older one, and a new file begins."""
    cpus: tuple[int, ...] | None = None
    """Cores that the process may run on; None: those of rank 0."""
    scratch: str | None = None
    """Directory for temporary files: made anew for each process, and removed with its tree, however the job ends. Its
    parent goes with the last directory in it."""


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The end of a process and of its whole tree."""

    name: str
    pid: int
    returncode: int
    """Exit status; -n when signal n ended it."""
    log_tail: str
    """Last lines that the process wrote to its log."""
    requested: bool = False
    """Whether the job asked for it (`stop`, `kill`, or the end of the host). False: it ended by itself."""


def encode(message: dict[str, Any]) -> bytes:
    """A message as one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class LineBuffer:
    """Cuts a byte stream into JSON objects, one a line."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any] | None]:
        """The objects that are complete with `data`; None for each line that is no JSON object."""
        self._rest += data
        while (end := self._rest.find(b"\n")) >= 0:
            line = bytes(self._rest[:end])
            del self._rest[: end + 1]
            yield self._decode(line)
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest.clear()
            yield None

    @staticmethod
    def _decode(line: bytes) -> dict[str, Any] | None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None
