"""The one writer of a terminal or pipe: a thread, so that a paused or slow one never stalls the event loop.

Invariants
- `write` never waits; what does not fit the queue is dropped and counted, and the count is shown in its place.
- Texts appear whole and in the order in which they were written, from whatever thread.
- A closed pipe (`| head`) ends the output, not the job.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TextIO

_QUEUE_LINES = 10_000


class TerminalWriter:
    """Writes texts to a stream from a daemon thread.

    `stream` is a function, so that a stream replaced later (a live display redirects `sys.stderr`) is respected.
    """

    def __init__(self, stream: Callable[[], TextIO]) -> None:
        self._stream = stream
        self._queue: queue.Queue[str | threading.Event | None] = queue.Queue(_QUEUE_LINES)
        self._dropped = 0
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="asyncrl-terminal", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Queues `text`, newline included."""
        try:
            self._queue.put_nowait(text)
        except queue.Full:
            self._dropped += 1

    def flush(self, timeout_s: float = 1.0) -> bool:
        """Waits until what was written before is out; False when that took longer. Not for the event loop."""
        deadline = time.monotonic() + timeout_s
        reached = threading.Event()
        try:
            self._queue.put(reached, timeout=timeout_s)
        except queue.Full:
            return False
        return reached.wait(max(0.0, deadline - time.monotonic()))

    def close(self, timeout_s: float = 1.0) -> None:
        """Flushes and ends the thread; later texts are lost. May be called again."""
        if self._thread.is_alive() and self.flush(timeout_s):
            self._queue.put_nowait(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            dropped, self._dropped = self._dropped, 0
            if dropped:
                item += f"... {dropped} lines dropped: the terminal was too slow\n"
            self._emit(item)

    def _emit(self, text: str) -> None:
        if self._broken:
            return
        try:
            stream = self._stream()
            stream.write(text)
            stream.flush()
        except UnicodeEncodeError:  # a terminal without UTF-8
            self._emit(text.encode("ascii", "backslashreplace").decode())
        except (OSError, ValueError):  # gone, or closed
            self._broken = True
