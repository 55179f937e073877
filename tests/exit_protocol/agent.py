"""Imitates torchrun's agent, in a fiftieth of its start-up time: `agent.py RANKS COMMAND...`.

Each rank has its own session. The agent forwards its signal to the process group of every rank; a second one arrives
as SIGTERM. When a rank fails, the agent sends SIGTERM to the others. After 30 s it sends SIGKILL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time


class Signalled(Exception):
    """The agent got a signal; `args` has its number."""


def on_signal(signum: int, _: object) -> None:
    raise Signalled(signum)


def close(ranks: list[subprocess.Popen[bytes]], signum: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signum)
    deadline = time.monotonic() + 30
    for rank in ranks:
        try:
            rank.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            rank.kill()


def main() -> int:
    world_size, command = int(sys.argv[1]), sys.argv[2:]
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, on_signal)
    shared = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": str(os.getpid())}
    shared |= {"WORLD_SIZE": str(world_size), "GROUP_RANK": "0"}
    ranks = [
        subprocess.Popen([sys.executable, *command], start_new_session=True, env=os.environ | shared | {"RANK": str(n)})
        for n in range(world_size)
    ]
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):
                close(ranks, signal.SIGTERM)
                return 1
            time.sleep(0.1)
        return max(abs(rank.returncode) for rank in ranks)
    except Signalled as first:
        try:
            close(ranks, first.args[0])
        except Signalled:
            close(ranks, signal.SIGTERM)
        return 1


if __name__ == "__main__":
    sys.exit(main())
