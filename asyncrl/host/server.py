"""The host process: a single-threaded selector loop around `HostState`.

It ignores signals of terminal and launcher. It ends by command, when its lifeline to rank 0 closes, and when rank 0 is
no longer its parent (a fork of rank 0 may hold the lifeline open). It always ends everything below it, and a rank 0
that does not answer a stop signal (`unanswered.py`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

from asyncrl.host.guardian import LOG_BEGINS, fork_guardian
from asyncrl.host.proc import become_subreaper, kill_descendants, reap, set_name
from asyncrl.host.process import LineBuffer, encode
from asyncrl.host.state import (
    Action,
    Answer,
    AnswerTail,
    HostState,
    KillOrphans,
    Launch,
    Leave,
    Sever,
    TellExit,
    Terminate,
)
from asyncrl.host.unanswered import UnansweredStops

EXIT_TAIL_LINES = 40
TAIL_BYTES = 64 << 10
"""What is read from the end of a log for its last lines."""

PARENT_CHECK_S = 0.5
LAST_SWEEP_S = 2.0
"""To end the processes that a dead guardian left, and at the end those that guardians did not end in time."""
FLUSH_S = 1.0
"""To send the last messages to rank 0."""


def log_tail(path: str, start: int, lines: int) -> str:
    """The last `lines` lines that were written to `path` from byte `start` on, at most `TAIL_BYTES` bytes of each file.

    A guardian's line ends at `start`. Where another text stands there the log was rotated since, and what was written
    just before that is in `path`.1.
    """
    try:
        with open(path, "rb") as log:
            log.seek(max(0, start - len(LOG_BEGINS)))
            rotated = start > 0 and log.read(len(LOG_BEGINS)) != LOG_BEGINS
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0 if rotated else start, size - TAIL_BYTES))
            text = log.read(TAIL_BYTES)
    except OSError as error:
        return f"(cannot read {path}: {error.strerror})"
    if rotated and len(text.splitlines()) < lines:
        with contextlib.suppress(OSError), open(f"{path}.1", "rb") as older:
            older.seek(max(0, older.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = older.read(TAIL_BYTES) + text
    return "\n".join(text.decode(errors="replace").splitlines()[-lines:]) if lines > 0 else ""


class HostServer:
    """Carries out the decisions of `HostState`."""

    def __init__(self, lifeline: socket.socket, parent: int, stops: UnansweredStops) -> None:
        self.state = HostState()
        self.lifeline = lifeline
        self.lifeline.setblocking(False)
        self.parent = parent
        self.stops = stops
        self.outbox = bytearray()
        self.guardians: dict[int, tuple[int, socket.socket, LineBuffer]] = {}
        self.requests = LineBuffer()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.lifeline, selectors.EVENT_READ, None)
        self.left = False

    def run(self) -> None:
        """Serves until the host is to end, then ends everything below it."""
        while not self.left:
            deadline = self.state.next_deadline()
            timeout_s = PARENT_CHECK_S if deadline is None else min(PARENT_CHECK_S, deadline - time.monotonic())
            for key, events in self.selector.select(max(timeout_s, 0.0)):
                if key.data is None:
                    self._on_lifeline(events)
                elif key.data in self.guardians:  # an earlier event of this round may have removed it
                    self._on_guardian(key.data)
            if os.getppid() != self.parent:
                self._do(self.state.on_lifeline_closed(time.monotonic()))
            self._do(self.state.on_time(time.monotonic()))
            self.stops.look(time.monotonic())
            reap()
        kill_descendants(os.getpid(), LAST_SWEEP_S)
        self._flush_last_words()

    def _on_lifeline(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if not events & selectors.EVENT_READ:
            return
        try:
            data = self.lifeline.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(self.lifeline)
            self._do(self.state.on_lifeline_closed(time.monotonic()))
            return
        for message in self.requests.feed(data):
            self._do(self.state.on_request(message, time.monotonic()))

    def _on_guardian(self, serial: int) -> None:
        _, channel, lines = self.guardians[serial]
        try:
            data = channel.recv(1 << 16)
        except OSError:
            data = b""
        for message in lines.feed(data):
            if message is not None:
                self._do(self.state.on_guardian(serial, message))
        if not data:
            self.selector.unregister(channel)
            channel.close()
            del self.guardians[serial]
            self._do(self.state.on_guardian_gone(serial))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Launch(serial, spec):
                    try:
                        pid, channel = fork_guardian(spec, self.parent)
                    except OSError as error:  # no process or descriptor left
                        failed = {"failed": f"{spec.name}: cannot fork: {error.strerror}"}
                        self._do(self.state.on_guardian(serial, failed))
                        continue
                    self.guardians[serial] = pid, channel, LineBuffer()
                    self.selector.register(channel, selectors.EVENT_READ, serial)
                case Terminate(serial):
                    if serial in self.guardians:
                        with contextlib.suppress(OSError):  # just ended: its exit is on the way
                            self.guardians[serial][1].sendall(encode({"terminate": True}))
                case Sever(serial):
                    if serial in self.guardians:
                        with contextlib.suppress(OSError):
                            self.guardians[serial][1].shutdown(socket.SHUT_WR)
                case KillOrphans():
                    guardians = [pid for pid, _, _ in self.guardians.values()]
                    kill_descendants(os.getpid(), LAST_SWEEP_S, exclude=guardians)
                case Answer(request_id, error, result):
                    self._tell({"id": request_id, "error": error, **result})
                case AnswerTail(request_id, path, start, lines):
                    self._tell({"id": request_id, "error": None, "tail": log_tail(path, start, lines)})
                case TellExit(name, pid, returncode, requested, survivors, path, start):
                    exit_notice = {
                        "exited": name,
                        "pid": pid,
                        "returncode": returncode,
                        "requested": requested,
                        "survivors": survivors,
                        "log_tail": log_tail(path, start, EXIT_TAIL_LINES),
                    }
                    self._tell(exit_notice)
                case Leave():
                    self.left = True

    def _tell(self, message: dict[str, Any]) -> None:
        self.outbox += encode(message)
        self._flush()

    def _flush(self) -> None:
        """Sends as much as the socket takes now. The host must not wait for rank 0, whose loop may be busy for long."""
        try:
            sent = self.lifeline.send(self.outbox)
        except BlockingIOError:
            sent = 0
        except OSError:  # rank 0 is gone
            self.outbox.clear()
            return
        del self.outbox[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outbox else 0)
        if self.lifeline in self.selector.get_map() and self.selector.get_key(self.lifeline).events != events:
            self.selector.modify(self.lifeline, events, None)

    def _flush_last_words(self) -> None:
        self.lifeline.settimeout(FLUSH_S)
        with contextlib.suppress(OSError):
            self.lifeline.sendall(self.outbox)


def main() -> None:
    """The host process. Its arguments: the descriptor of the lifeline, the pid of rank 0, and those of its signals."""
    lifeline_fd, parent = int(sys.argv[1]), int(sys.argv[2])
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, lambda *_: None)  # a handler, unlike SIG_IGN, is not inherited through exec
    os.set_inheritable(lifeline_fd, False)
    become_subreaper()
    set_name("asyncrl-host")
    HostServer(socket.socket(fileno=lifeline_fd), parent, UnansweredStops(parent, sys.argv[3:])).run()


if __name__ == "__main__":
    main()
