"""Linux process control through /proc and prctl: descendants, subreapers, parent-death signals, the job's mark.

Nothing here holds state. A scan reads every /proc/<pid>/stat (about 10 µs each). Scans run at the end of a process, not
while it works.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

JOB_MARK = "ASYNCRL_JOB"
"""Environment variable that every process under one host carries. Its value is random for each host."""

HOSTS: set[int] = set()
"""Pids of the hosts that this process has started and not yet seen end."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int | bytes) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def kill_hosts() -> None:
    """SIGKILL to every host of this process, which works on one that stands still; its guardians end the rest."""
    for pid in tuple(HOSTS):
        _kill(pid)


def become_subreaper() -> None:
    """Makes this process, in place of init, the parent of orphans among its descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Sets the name that ps and top show, at most 15 characters."""
    _prctl(_PR_SET_NAME, name.encode())


def die_with_parent(parent: int) -> None:
    """SIGKILL ends this process when the *thread* of `parent` that started it ends, and at once if it has ended."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _stat(pid: int) -> tuple[int, str] | None:
    """Parent and state letter of a process; None when it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, parent = text[text.rindex(b")") + 2 :].split(maxsplit=2)[:2]
    return int(parent), state.decode()


def pids() -> list[int]:
    """The pids of all processes that /proc shows."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def descendants(root: int, exclude: Iterable[int] = ()) -> dict[int, str]:
    """All processes below `root`, without the trees of `exclude`: pid → state letter (`Z`: a zombie)."""
    children: dict[int, list[tuple[int, str]]] = {}
    for pid in pids():
        found = _stat(pid)
        if found is not None:
            children.setdefault(found[0], []).append((pid, found[1]))
    skipped = set(exclude)
    below: dict[int, str] = {}
    frontier = [root]
    while frontier:
        for pid, state in children.get(frontier.pop(), []):
            if pid not in skipped and pid not in below:
                below[pid] = state
                frontier.append(pid)
    return below


def reap() -> dict[int, int]:
    """Collects every dead child of this process: pid → exit code (-n for signal n)."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def kill_descendants(
    root: int, timeout_s: float, exclude: Iterable[int] = (), reap: Callable[[], object] = reap
) -> int:
    """SIGKILLs everything below `root` until a scan finds nothing left; returns how many survived (0 is normal).

    `root` should be a subreaper, else an orphan escapes between two scans. Only a process in uninterruptible sleep can
    outlast `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    excluded = tuple(exclude)
    pause_s = 0.001
    while True:
        reap()
        alive = [pid for pid, state in descendants(root, excluded).items() if state != "Z"]
        if not alive or time.monotonic() > deadline:
            return len(alive)
        for pid in alive:
            _kill(pid)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def marked(job: str) -> list[int]:
    """Live processes whose environment, as of their exec, carries `ASYNCRL_JOB=<job>`.

    These are processes that the guardians may have missed. SGLang's schedulers call setproctitle, which would write the
    title over the environment with its mark; so the host sets SPT_NOENV for all processes that it starts. A process
    that clears its own environment is not found.
    """
    wanted = f"{JOB_MARK}={job}".encode()
    return [pid for pid in pids() if pid != os.getpid() and wanted in _environment(pid)]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def end_marked(job: str, patience_s: float, timeout_s: float) -> int:
    """Waits `patience_s` for the processes of `job` to end by themselves, then SIGKILLs them; returns the survivors."""
    start = time.monotonic()
    while left := marked(job):
        elapsed_s = time.monotonic() - start
        if elapsed_s > patience_s + timeout_s:
            return len(left)
        if elapsed_s > patience_s:
            for pid in left:
                _kill(pid)
        time.sleep(0.02)
    return 0
