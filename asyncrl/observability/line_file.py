"""Files of JSON lines that survive full disks, torn writes and killed writers.

Invariants
- When `append` returns True, the whole line is in the file and survives a SIGKILL of this process.
- A line cut short (full disk, killed writer) never damages the next line, which starts on a fresh line.
- `append` neither raises nor waits. It counts lines that it cannot write in `lost`.
- A reader never hides damage: it yields an `unreadable` record in place of a damaged line.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import RunDirectoryError

UNREADABLE = "unreadable"
"""`kind` of the record that a reader yields for a damaged line. Its other fields are `line` (from 1) and `text`."""

_SHOWN_BYTES = 200


def to_plain(value: object) -> object:
    """Returns a JSON type for a value that msgspec does not know: the number in a numpy or torch scalar, else text."""
    item = getattr(value, "item", None)
    if callable(item):
        try:
            return item()
        except (TypeError, ValueError, RuntimeError):  # an array of several elements
            return str(value)
    return str(value)


def without_surrogates(value: Any) -> Any:
    """Returns `value` with lone surrogates in its texts written as escapes, because UTF-8 cannot encode them."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_surrogates(item) for item in value]
    return value


def encode_line(record: Mapping[str, Any]) -> bytes:
    """Returns `record` as one JSON line; values of unknown types become text, NaN and infinity become null."""
    try:
        line = msgspec.json.encode(record, enc_hook=to_plain)
    except UnicodeEncodeError:  # lone surrogates, as in a log tail decoded with surrogateescape
        line = msgspec.json.encode(without_surrogates(msgspec.to_builtins(record, enc_hook=to_plain)))
    return line + b"\n"


class LineFile:
    """Appends whole lines to one file, which it opens once; safe from any thread.

    Raises RunDirectoryError when the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        """Number of lines that could not be written so far."""
        self.last_error: OSError | None = None
        """Why the latest lost line could not be written; None without a reason from the system."""
        self._lock = threading.Lock()
        # O_NONBLOCK has no effect on a regular file. On a named pipe, a slow reader then costs lines instead of time.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._fd: int | None = os.open(path, flags, 0o644)
            self._torn = self._ends_torn(self._fd)
        except OSError as error:
            raise RunDirectoryError(
                f"{path}: cannot be written ({error.strerror}); make it writable or set run.dir"
            ) from error

    @staticmethod
    def _ends_torn(fd: int) -> bool:
        """True if the file ends within a line, because an earlier writer was killed."""
        status = os.fstat(fd)
        return stat.S_ISREG(status.st_mode) and status.st_size > 0 and os.pread(fd, 1, status.st_size - 1) != b"\n"

    def append(self, line: bytes) -> bool:
        """Writes `line`, which ends in a newline; returns False if it is lost."""
        with self._lock:
            if self._fd is None:
                self.lost += 1
                return False
            data = b"\n" + line if self._torn else line
            try:
                written = os.write(self._fd, data)
            except OSError as error:
                self.lost += 1
                self.last_error = error
                return False
            if written == len(data):
                self._torn = False
                return True
            if written > 0:
                self._torn = data[written - 1 : written] != b"\n"
            self.lost += 1
            self.last_error = OSError(errno.ENOSPC, "no space for the whole line")
            return False

    def close(self) -> None:
        """Closes the file; later lines are lost. May be called again."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file in order, without a torn last line: its writer may still be writing it."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield record
            else:
                yield {
                    "kind": UNREADABLE,
                    "line": number,
                    "text": line[:_SHOWN_BYTES].decode(errors="replace").rstrip(),
                }
