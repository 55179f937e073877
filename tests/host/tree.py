"""A process that is hard to get rid of: `tree.py FIFO`.

It ignores SIGTERM, has a child in its session, and a double-forked grandchild in a session of its own with an empty
environment. Each writes its pid to the FIFO and holds it open, so that whoever reads it learns of all of them, and
sees the end of file when the last is dead.
"""

from __future__ import annotations

import os
import signal
import sys


def stay(fifo: str) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    fd = os.open(fifo, os.O_WRONLY)
    os.write(fd, f"{os.getpid()}\n".encode())
    while True:
        signal.pause()


def main() -> None:
    fifo = sys.argv[1]
    if sys.argv[2:] == ["leaf"]:
        stay(fifo)
    if os.fork() == 0:
        stay(fifo)
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, "-I", "-S", __file__, fifo, "leaf"], {})
        os._exit(0)
    os.waitpid(middle, 0)
    print("the tree has grown", flush=True)
    stay(fifo)


if __name__ == "__main__":
    main()
