"""The only writer to a terminal or pipe: a thread, so that a paused or slow terminal never stalls the event loop.

Invariants
- `write` never waits. It drops texts that do not fit the queue, counts them, and shows the count in their place.
- Texts appear whole, and in the order in which threads wrote them.
- A closed pipe (`| head`) ends the output, not the job.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TextIO

from asyncrl.errors import counted

_QUEUE_LINES = 10_000


class TerminalWriter:
    """Writes texts to a stream from a daemon thread.

    `stream` is a function that returns the stream, because the stream may change: a live display redirects
    `sys.stderr`.
    """

    def __init__(self, stream: Callable[[], TextIO]) -> None:
        self._stream = stream
        self._queue: queue.Queue[str | threading.Event | None] = queue.Queue(_QUEUE_LINES)
        self._dropped = 0
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="asyncrl-terminal", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Queues `text`, which includes its newline."""
        try:
            self._queue.put_nowait(text)
        except queue.Full:
            self._dropped += 1

    def flush(self, timeout_s: float = 1.0) -> bool:
        """Waits until earlier texts are written; returns False after `timeout_s`. Blocks: not for the event loop."""
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
                item += f"... {counted(dropped, 'line')} dropped: the terminal was too slow\n"
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
        except (OSError, ValueError):  # the reader is gone, or the stream is closed
            self._broken = True
