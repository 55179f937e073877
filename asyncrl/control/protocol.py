"""Requests to a running job and its answers: one line of JSON each way, over a Unix socket.

Invariants
- A connection carries one request and one answer. Both have a largest size.
- The socket lies in the run directory, so its address follows from that, and only its owner can connect. No port is
  opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

REQUEST_BYTES = 1 << 14
ANSWER_BYTES = 1 << 22
"""Enough for the table of 4096 engines."""


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command"):
    """What all requests have in common."""


class StartCell(_Request, frozen=True, tag="cell start"):
    """Start an engine that was stopped or given up, or a new one."""

    engine: str | None = None
    """None lets the job choose."""
    wait: bool = False
    """Answer only when the engine serves."""


class StopCell(_Request, frozen=True, tag="cell stop"):
    """Take an engine out of service; it finishes its requests first. Answered when it has ended."""

    engine: str
    force: bool = False
    """Also if it is the last one that serves."""


class ShowHealth(_Request, frozen=True, tag="health"):
    """Tell the state of all engines."""


class SetProbing(_Request, frozen=True, tag="health probing"):
    """Pause the health probes of engines, or resume them."""

    paused: bool


Request = StartCell | StopCell | ShowHealth | SetProbing


class EngineRow(msgspec.Struct, frozen=True):
    """One engine in the answer to `ShowHealth`."""

    engine: str
    model: str
    """`actor` is the trained one."""
    state: str
    version: str | None
    """Published version that it holds."""
    restarts: int
    """How often it was started again."""
    url: str


class Health(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ShowHealth`."""

    engines: tuple[EngineRow, ...]
    published_version: str | None
    probes_paused: bool


class CarriedOut(msgspec.Struct, frozen=True, tag=True):
    """The answer to a request that was carried out."""

    message: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The answer to a request that was not carried out, or not to its end."""

    message: str


Answer = Health | CarriedOut | Refused


def line_of(message: Request | Answer) -> bytes:
    """The message as one line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def read_request(line: bytes) -> Request:
    """Raises msgspec.DecodeError or UnicodeDecodeError for a line that is no request."""
    return msgspec.json.decode(line, type=Request)


def read_answer(line: bytes) -> Answer:
    """Raises msgspec.DecodeError or UnicodeDecodeError for a line that is no answer."""
    return msgspec.json.decode(line, type=Answer)


@contextmanager
def short_path(address: Path) -> Iterator[str]:
    """A name of the socket at `address` that `bind` and `connect` take, however long the path is.

    The kernel takes paths of at most 107 bytes, so the name leads through a descriptor of the directory. Raises OSError
    when there is no such directory.
    """
    directory = os.open(address.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{address.name}"
    finally:
        os.close(directory)
