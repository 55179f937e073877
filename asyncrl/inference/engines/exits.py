"""The message about a process that ended: its name, how and when it ended, and the end of its log."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from asyncrl.errors import EngineError
from asyncrl.host import HostedProcess, ProcessExit

TAIL_LINES = 20
_SHARED_MEMORY = "/dev/shm"
_LITTLE_BYTES = 64 << 20
"""An engine needs about 1 MB there at its start, and on several GPUs some tens more."""


def describe_exit(name: str, process: ProcessExit, log_path: Path, when: str) -> str:
    """`engine-0 (pid 17) exited with code 1 before its first generation. Last lines of …:` and those lines."""
    return (
        f"{name} (pid {process.pid}) {_manner(process.returncode)} {when}. Last lines of {log_path}:\n"
        f"{indent(process.log_tail)}{shared_memory_hint(ended_by_bus_error=process.returncode == -signal.SIGBUS)}"
    )


async def last_lines(process: HostedProcess) -> str:
    """`Last lines of …:` and the lines, of a process that lives; says so where the host does not know them."""
    try:
        tail = await process.tail(TAIL_LINES)
    except EngineError as error:
        tail = f"(unknown: {error})"
    return f"Last lines of {process.spec.log_path}:\n{indent(tail)}{shared_memory_hint()}"


def shared_memory_hint(*, ended_by_bus_error: bool = False) -> str:
    """A line about /dev/shm where it is nearly full, or where a process ended as it does for lack of room there."""
    try:
        disk = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        return ""
    if disk.free >= _LITTLE_BYTES and not ended_by_bus_error:
        return ""
    return (
        f"\n{_SHARED_MEMORY} has {disk.free >> 20} of {disk.total >> 20} MiB free, and a process that finds no room "
        "there is ended by SIGBUS: remove files that no process uses, or enlarge it (docker run --shm-size)"
    )


def indent(log_tail: str) -> str:
    """The lines of a log, each set in by four spaces."""
    return "\n".join("    " + line for line in log_tail.rstrip().splitlines()) or "    (empty)"


def _manner(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"
