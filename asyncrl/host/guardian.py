"""The guardian of one spawned process: a fork of the host that is its parent and the subreaper of its whole tree.

It is a process of its own for two reasons. Every descendant belongs to its name, even one that opens a session or
writes a title over its environment. And it outlives the host for the moment that it takes to kill them.

- It tells the host `started` or `failed`, and at the end `exited`, once the tree is dead.
- The host tells it `terminate`, which means SIGTERM to the process's group. End of file means that the host wants an
  end, or is dead: the guardian kills the tree.
- It rotates the log of its process.
- It removes the files that the tree leaves in /dev/shm and in its scratch directory, also when job and host have ended
  before.
- It watches rank 0 as well: a host that stands still (SIGSTOP) would not notice its end. Such a host is killed.
- If the guardian itself is SIGKILLed, the process dies by its parent-death signal, and the host kills the orphans.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl.host.proc import become_subreaper, die_with_parent, kill_descendants, reap, set_name
from asyncrl.host.process import INHERITED, LineBuffer, ProcessSpec, encode
from asyncrl.host.shared_memory import LOOK_S, SharedFiles

KILL_TIMEOUT_S = 10.0
LOG_BEGINS = b" starts\n"
"""The end of the line that a guardian writes before the first of its process."""
"""How long SIGKILLed descendants may take to vanish before they are reported as survivors. A GPU driver may take
seconds to give back the memory that a process had pinned."""

HOST_PATIENCE_S = 3.0
"""How long the host may take to notice the end of rank 0: half a second, unless it stands still."""

_DEFAULTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a spawned process finds at their default, even if rank 0's launcher ignored them (nohup, `&`)."""


def fork_guardian(spec: ProcessSpec, rank_zero: int) -> tuple[int, socket.socket]:
    """Forks a guardian for `spec` from a process of one thread; returns its pid and the host's end of its channel.

    `rank_zero`: pid of the host's parent.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            _close_all_but(theirs.fileno())
            _Guardian(theirs, spec, rank_zero).run()
        except BaseException:  # this is a fork: nothing may travel up into the host's frames
            traceback.print_exc()  # into the host's log
        finally:
            os._exit(0)  # never return into the host's loop
    theirs.close()
    return pid, ours


def _close_all_but(kept: int) -> None:
    """Closes the descriptors that the fork inherited. A copy of the lifeline or of a channel would hide its end."""
    for fd in [int(entry) for entry in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd != kept:
            try:
                os.close(fd)
            except OSError:  # the descriptor of the listing itself
                continue


class _Guardian:
    def __init__(self, channel: socket.socket, spec: ProcessSpec, rank_zero: int) -> None:
        self.channel = channel
        self.spec = spec
        self.host = os.getppid()
        self.rank_zero = _pidfd(rank_zero)
        self.main = 0
        self.log_grows = spec.log_path != INHERITED and (
            Path(spec.log_path).is_file() or not Path(spec.log_path).exists()
        )
        """Whether the log is a file that can grow: not /dev/null, not a terminal."""
        self.files = SharedFiles()
        self.ended: dict[int, int] = {}
        """Exit codes of the children collected so far, by pid: the process itself and orphans of its tree."""

    def run(self) -> None:
        os.setsid()
        become_subreaper()
        set_name(f"guard:{self.spec.name}")
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        try:
            log_start = self._launch()
        except _CannotStart as error:
            self._tell({"failed": f"{self.spec.name}: {error}"})
            return
        self._tell({"started": self.main, "log_start": log_start})
        self._watch(wake)
        self.files.look(ended=self.main in self.ended)
        survivors = kill_descendants(os.getpid(), KILL_TIMEOUT_S, reap=self._reap)
        self.files.remove()
        self._remove_scratch()
        self._tell({"exited": self.ended.get(self.main, -signal.SIGKILL), "survivors": survivors})

    def _launch(self) -> int:
        """Starts the process; returns where in the log its own output begins."""
        guardian = os.getpid()
        log = None if self.spec.log_path == INHERITED else self._open_log()
        log_start = 0 if log is None else os.fstat(log).st_size
        self._make_scratch()
        if self.spec.cpus is not None:
            try:
                os.sched_setaffinity(0, self.spec.cpus)
            except (OSError, ValueError) as error:
                raise _CannotStart(f"cannot run on cpus {self.spec.cpus}: {_reason(error)}") from error

        def before_exec() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            for signum in _DEFAULTED:
                signal.signal(signum, signal.SIG_DFL)
            die_with_parent(guardian)

        try:
            process = subprocess.Popen(
                self.spec.argv,
                env=os.environ | self.spec.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=before_exec,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise _CannotStart(f"cannot execute {self.spec.argv[0]!r}: {_reason(error)}") from error
        if log is not None:
            os.close(log)
        self.main = process.pid
        process.returncode = 0  # `reap` collects it, not Popen
        return log_start

    def _open_log(self) -> int:
        path = self.spec.log_path
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            # a full disk shows only in a write
            os.write(log, f"[asyncrl] {time.strftime('%Y-%m-%d %H:%M:%S')} {self.spec.name}".encode() + LOG_BEGINS)
        except (OSError, ValueError) as error:
            raise _CannotStart(f"cannot write its log {path!r}: {_reason(error)}") from error
        return log

    def _rotate_log(self) -> None:
        """Keeps the log of a process that prints without end from filling the disk.

        The process goes on writing at the end of the same file, so the file is copied and cut. What is written between
        the two is lost.
        """
        path = self.spec.log_path
        with suppress(OSError):
            if not self.log_grows or os.stat(path).st_size <= self.spec.log_bytes:
                return
            try:
                shutil.copy(path, f"{path}.1")
            except OSError:  # the disk is full: better no older part than no room
                with suppress(OSError):
                    os.unlink(f"{path}.1")
            os.truncate(path, 0)

    def _make_scratch(self) -> None:
        if self.spec.scratch is None:
            return
        try:
            shutil.rmtree(self.spec.scratch, ignore_errors=True)
            os.makedirs(self.spec.scratch, mode=0o700)
        except OSError as error:
            raise _CannotStart(f"cannot make its directory {self.spec.scratch!r}: {_reason(error)}") from error

    def _remove_scratch(self) -> None:
        if self.spec.scratch is not None:
            shutil.rmtree(self.spec.scratch, ignore_errors=True)
            with suppress(OSError):  # others have theirs in it
                os.rmdir(os.path.dirname(self.spec.scratch))

    def _watch(self, wake: int) -> None:
        """Returns when the process has ended, or the host wants its end, or stands still although rank 0 has ended."""
        lines = LineBuffer()
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(wake, select.POLLIN)
        orphaned_at: float | None = None
        if self.rank_zero is not None:
            poll.register(self.rank_zero, select.POLLIN)
        else:
            orphaned_at = time.monotonic()
        while self.main not in self.ended:
            ready = {fd for fd, _ in poll.poll(1000 * LOOK_S)}
            if self.rank_zero in ready:
                poll.unregister(self.rank_zero)
                orphaned_at = time.monotonic()
            if orphaned_at is not None and time.monotonic() > orphaned_at + HOST_PATIENCE_S:
                if os.getppid() == self.host:
                    os.kill(self.host, signal.SIGKILL)
                return
            self.files.look()
            self._rotate_log()
            if wake in ready:
                os.read(wake, 4096)
            self._reap()
            if self.channel.fileno() not in ready:
                continue
            try:
                data = self.channel.recv(4096)
            except ConnectionError:
                return
            if not data:
                return
            for message in lines.feed(data):
                # not reaped, so the group id cannot belong to anyone else
                if message is not None and self.main not in self.ended:
                    os.killpg(self.main, signal.SIGTERM)

    def _reap(self) -> None:
        self.ended |= reap()

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self.channel.sendall(encode(message))
        except OSError:  # the host is gone; the work goes on without it
            return


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:  # it has ended
        return None


class _CannotStart(Exception):
    """Why a process could not be started, in words."""


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
