"""The part of the exit protocol that ranks call: `prepare_rank` in every rank, `RankZeroExit` around the driver."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio

from asyncrl.exit_protocol.beacon import beacon_name, light_beacon
from asyncrl.exit_protocol.policy import GRACEFUL_SIGNAL, HOST_MARGIN_S, RankPolicy, RankZeroPolicy
from asyncrl.exit_protocol.watch import ExitWatch
from asyncrl.host.proc import die_with_parent
from asyncrl.host.unanswered import STOP_SIGNALS, StopSignals


def prepare_rank(stop_grace_s: float = 12.0, environ: Mapping[str, str] = os.environ) -> RankExit | None:
    """Prepares the exit of a rank. Every rank calls it first, before heavy imports.

    The rank then dies with its agent. Ranks >= 1 also get a `RankExit`; rank 0 gets None.
    """
    arm_parent_death(environ)
    return RankExit(stop_grace_s, environ) if int(environ.get("RANK", "0")) > 0 else None


def arm_parent_death(environ: Mapping[str, str] = os.environ) -> None:
    """Under torchrun, asks the kernel to SIGKILL this rank when the agent ends; otherwise does nothing.

    The agent starts its ranks from its main thread, so the signal cannot come too early. Without torchrun, the parent
    is a shell or a scheduler's step, and a job under nohup must outlive that.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return
    parent = os.getppid()
    if parent == 1 and not _is_python(parent):
        parent = 0  # the agent is already dead, and init has adopted this rank
    die_with_parent(parent)


def _is_python(pid: int) -> bool:
    """True if process `pid` runs Python, as the agent does; in a container the agent may be process 1."""
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False


_asked_early: list[int] = []
"""Graceful signals that arrived before a `RankZeroExit` was entered."""


def keep_graceful_stop() -> None:
    """Keeps an early SIGUSR1, which would otherwise kill this process, for the later `RankZeroExit`.

    Rank 0 calls it, in its main thread.
    """
    signal.signal(GRACEFUL_SIGNAL, lambda signum, _frame: _asked_early.append(signum))


class RankZeroExit:
    """Rank 0's part: the driver enters it in its event loop.

        with RankZeroExit(grace_s) as rank_exit:
            tasks.start_soon(rank_exit.stop_on_signals, scope)
            ...                              # the job
        rank_exit.stopped_by, rank_exit.exit_code

    The deadline of a stop stays in force after the block, until the process is gone.
    """

    def __init__(
        self,
        stop_grace_s: float,
        environ: Mapping[str, str] = os.environ,
        *,
        tell: Callable[[str], None] = lambda answer: None,
    ) -> None:
        """`tell` gets one line for the person who asked for a stop. A thread calls it during the block; it must not
        wait."""
        self._policy = RankZeroPolicy(stop_grace_s)
        self._world_size = int(environ.get("WORLD_SIZE", "1"))
        self._beacon_name = beacon_name(environ)
        self._beacon: socket.socket | None = None
        handled = _handled(environ, (*STOP_SIGNALS, GRACEFUL_SIGNAL))
        self._watch = ExitWatch(self._policy, "rank 0", handled, tell=tell)
        self.stop = self._policy.stop
        """Request for a graceful stop. SIGUSR1 makes it; other code may make it too."""

    @property
    def stopped_by(self) -> signal.Signals | None:
        """The signal that stopped the job; None if there was none."""
        return self._policy.stopped_by

    @property
    def leave_by(self) -> float | None:
        """time.monotonic() at which the process leaves by force; None before a stop or the end of the run."""
        return self._policy.leave_by

    @property
    def exit_code(self) -> int | None:
        """128 + n if signal n stopped the job; None if no signal did."""
        return self._policy.exit_code if self._policy.stopped_by is not None else None

    @property
    def stop_signals(self) -> StopSignals:
        """For the host, which ends this process where code that holds the interpreter keeps it from ending itself."""
        return StopSignals(self._watch.stop_signals, self._policy.stop_grace_s + HOST_MARGIN_S)

    def __enter__(self) -> Self:
        if _asked_early:
            self.stop.request()
        if self._world_size > 1:
            self._beacon = light_beacon(self._beacon_name, self._world_size)
        self._watch.arm()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Disarms the watch. The beacon stays lit until the process ends, because ranks watch the process behind it."""
        if error is not None and self._policy.leave_by is None:
            self.expect_exit(1)
        self._watch.disarm(keep_deadline=self._policy.leave_by is not None)

    async def stop_on_signals(self, scope: anyio.CancelScope) -> None:
        """Cancels `scope` at a stop signal, also one that arrived before this call.

        If this task is cancelled itself, because another task failed, it starts the deadline of the shutdown.
        """
        try:
            await anyio.wait_readable(self._watch.orders)
            scope.cancel(f"stopped by {self._policy.stopped_by!s}")
        finally:
            if self._policy.leave_by is None:
                self.expect_exit(1)

    @contextmanager
    def bounded_end(self) -> Iterator[None]:
        """Runs the job as its body; starts the deadline of the shutdown when the job returns or raises."""
        try:
            yield
        except BaseException as error:  # the deadline starts whatever ends the job, also cancellation
            told = "" if isinstance(error, anyio.get_cancelled_exc_class()) else f"{type(error).__name__}: {error}"
            self.expect_exit(1, told)
            raise
        self.expect_exit(0)

    def expect_exit(self, exit_code: int, error: str = "") -> None:
        """Starts the deadline of a shutdown stage; after it the process leaves by force with `exit_code`.

        The line on stderr then names `error`. Call it again for the next stage. After a stop signal, all stages share
        the grace that the signal started.
        """
        self._policy.expect_exit(exit_code, time.monotonic(), error)
        self._watch.wake()


class RankExit:
    """The part of ranks >= 1: `prepare_rank` arms it for the rest of the process."""

    def __init__(self, stop_grace_s: float, environ: Mapping[str, str] = os.environ) -> None:
        on_node_of_rank_zero = environ.get("GROUP_RANK", "0") == "0"
        self._policy = RankPolicy(stop_grace_s, watches_rank_zero=on_node_of_rank_zero)
        self._watch = ExitWatch(
            self._policy,
            f"rank {environ['RANK']}",
            _handled(environ, STOP_SIGNALS),
            beacon_name(environ) if on_node_of_rank_zero else None,
        )
        self._watch.arm()

    def allow(self, stop_grace_s: float) -> None:
        """Sets the grace of rank 0, once the configuration is known."""
        self._policy.stop_grace_s = stop_grace_s

    def expect_exit(self, exit_code: int) -> None:
        """The rank has done its work: it exits within the grace, or leaves by force with `exit_code`."""
        self._policy.expect_exit(exit_code, time.monotonic())
        self._watch.wake()


def _handled(environ: Mapping[str, str], signals: tuple[signal.Signals, ...]) -> tuple[signal.Signals, ...]:
    """Returns the signals to handle: all of `signals`, without SIGHUP under nohup.

    torchrun handles SIGHUP even under nohup, so its ranks do too.
    """
    if "TORCHELASTIC_RUN_ID" in environ or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        return signals
    return tuple(signum for signum in signals if signum != signal.SIGHUP)
