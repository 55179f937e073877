"""A rank 0 that does nothing but own a tree: `rank_zero.py LOG_DIR FIFO NAME [fork]`; prints the host's pid.

With `fork` it also leaves a fork of itself behind, which holds the lifeline open.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import anyio

from asyncrl.host import EngineHost, ProcessSpec

TREE = str(Path(__file__).with_name("tree.py"))


async def main(log_dir: str, fifo: str, name: str, *options: str) -> None:
    async with EngineHost.start(log_dir) as host:
        argv = (sys.executable, "-I", "-S", TREE, fifo)
        await host.spawn(ProcessSpec(name, argv, {}, f"{log_dir}/{name}.log", scratch=f"{log_dir}/tmp/0"))
        if "fork" in options and os.fork() == 0:
            fd = os.open(fifo, os.O_WRONLY)
            os.write(fd, f"{os.getpid()}\n".encode())
            os.close(fd)
            signal.pause()
        print(host.pid, flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
