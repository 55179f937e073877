"""A rank that follows the exit protocol and trains nothing: `rank_program.py DIRECTORY MODE STOP_GRACE_S`.

It writes DIRECTORY/rank-N.pid, then signs in at DIRECTORY/roster and holds it open. The process tree of rank 0's host,
the host itself and its guardians do the same. Ranks >= 1 block in C, as in a collective. MODE is what rank 0 does:

- `listen`: runs its loop, disposes when cancelled
- `stuck`: blocks its loop in C
- `undisposable`: runs its loop, hangs in disposal
- `steps`: looks for a graceful stop between its steps, exits with 0
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from asyncrl.exit_protocol import RankZeroExit, prepare_rank

TREE = str(Path(__file__).parents[1] / "host" / "tree.py")


def sign_in(directory: Path, rank: int) -> None:
    (directory / f"rank-{rank}.pid").write_text(str(os.getpid()))
    os.write(os.open(directory / "roster", os.O_WRONLY), f"{os.getpid()}\n".encode())


def block_in_c() -> None:
    """Blocks like a collective that never ends: without the GIL, without signal handlers, restarted after signals."""
    libc = ctypes.CDLL(None)
    semaphore = ctypes.create_string_buffer(64)
    libc.sem_init(semaphore, 0, 0)
    libc.sem_wait(semaphore)


async def drive(directory: Path, mode: str, stop_grace_s: float) -> int:
    import anyio

    from asyncrl.host import EngineHost, ProcessSpec

    logs = directory / "logs"
    logs.mkdir()
    (logs / "host.log").symlink_to(directory / "roster")  # makes the host sign in, too
    with RankZeroExit(stop_grace_s) as rank_exit:
        async with EngineHost.start(logs) as host, anyio.create_task_group() as tasks:
            tasks.start_soon(rank_exit.stop_on_signals, tasks.cancel_scope)
            argv = (sys.executable, "-I", "-S", TREE, str(directory / "roster"))
            await host.spawn(ProcessSpec("engine-0", argv, {}, str(logs / "engine-0.log")))
            sign_in(directory, 0)
            try:
                if mode == "stuck":
                    block_in_c()
                while not rank_exit.stop.requested:  # noqa: ASYNC110 a flag, as the loop sees it
                    await anyio.sleep(0.05)
                tasks.cancel_scope.cancel()
            finally:
                if mode == "undisposable":
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep_forever()
        code = rank_exit.exit_code or 0
        rank_exit.expect_exit(code)
        return code


def main() -> int:
    directory, mode, stop_grace_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    rank_exit = prepare_rank(stop_grace_s)
    if rank_exit is None:
        import anyio

        return anyio.run(drive, directory, mode, stop_grace_s, backend_options={"use_uvloop": True})
    sign_in(directory, int(os.environ["RANK"]))
    block_in_c()
    return 0


if __name__ == "__main__":
    sys.exit(main())
