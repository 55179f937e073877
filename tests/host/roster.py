from __future__ import annotations

import os
from pathlib import Path

import anyio


class Roster:
    """A FIFO that every process of a tree holds open: tells who they are, and when the last of them is dead."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._text = b""

    async def pids(self, count: int, timeout_s: float = 20) -> list[int]:
        """Waits until `count` processes have signed in."""
        with anyio.fail_after(timeout_s):
            while self._text.count(b"\n") < count:
                self._text += await self._read()
        return [int(line) for line in self._text.split()]

    async def empty(self, timeout_s: float) -> None:
        """Waits until all who signed in are dead; TimeoutError if they do not die in time."""
        with anyio.fail_after(timeout_s):
            while await self._read():
                pass

    async def _read(self) -> bytes:
        """What was written since; empty when nobody holds the FIFO any more."""
        while True:
            await anyio.wait_readable(self._fd)
            try:
                return os.read(self._fd, 4096)
            except BlockingIOError:  # readable for a moment only: one holder had gone and another came
                continue

    def close(self) -> None:
        os.close(self._fd)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def command_of(pid: int) -> str:
    """Empty when the process is dead."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
