"""How the end of a process is told: who, how, when, and the end of its log. Pure."""

from __future__ import annotations

import signal
from pathlib import Path

from asyncrl.host import ProcessExit


def describe_exit(name: str, process: ProcessExit, log_path: Path, when: str) -> str:
    """`engine-0 (pid 17) exited with code 1 before its first generation. Last lines of …:` and those lines."""
    return (
        f"{name} (pid {process.pid}) {_manner(process.returncode)} {when}. Last lines of {log_path}:\n"
        f"{indent(process.log_tail)}"
    )


def indent(log_tail: str) -> str:
    return "\n".join("    " + line for line in log_tail.rstrip().splitlines()) or "    (empty)"


def _manner(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"
