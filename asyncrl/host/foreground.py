"""One process in the foreground of a terminal, under a guardian as a job's processes are, and without a host.

So its whole tree ends with it, and leaves no files behind, whatever ends it: a signal to this process, the end of this
process in any way, or its own.
"""

from __future__ import annotations

import os
import signal
import socket
from types import FrameType

from asyncrl.errors import EngineError
from asyncrl.host.guardian import KILL_TIMEOUT_S, fork_guardian
from asyncrl.host.proc import become_subreaper, kill_descendants
from asyncrl.host.process import LineBuffer, ProcessSpec, encode

_ASK_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BY_SIGNAL = 128
"""An exit code above this names the signal that ended a process."""


def run_in_foreground(spec: ProcessSpec, *, grace_s: float) -> int:
    """Runs `spec` to its end; returns its exit code, or 128 + n where signal n ended it or this process was sent one.

    SIGINT, SIGTERM and SIGHUP to this process are passed on as SIGTERM, unless this process ignores them (nohup).
    After `grace_s`, or at a second signal, SIGKILL follows for the whole tree. Call it from the main thread of a
    process without other threads. Raises EngineError where the process cannot be started.
    """
    become_subreaper()
    _, guardian = fork_guardian(spec, os.getpid())
    asked: list[int] = []

    def ask_to_end(signum: int, frame: FrameType | None) -> None:
        try:
            if asked:
                guardian.shutdown(socket.SHUT_WR)  # nothing more is sent: the guardian kills the tree
                return
            asked.append(signum)
            guardian.sendall(encode({"op": "terminate"}))
            signal.setitimer(signal.ITIMER_REAL, grace_s)
        except OSError:  # the guardian has ended
            return

    for signum in (*_ASK_TO_END, signal.SIGALRM):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, ask_to_end)
    lines = LineBuffer()
    with guardian:
        while data := guardian.recv(4096):
            for message in lines.feed(data):
                if message is not None and "failed" in message:
                    raise EngineError(message["failed"])
                if message is not None and "exited" in message:
                    code = -asked[0] if asked else int(message["exited"])
                    return code if code >= 0 else _BY_SIGNAL - code
    kill_descendants(os.getpid(), KILL_TIMEOUT_S)
    raise EngineError(f"{spec.name}: its guardian was killed, and the process with it")
