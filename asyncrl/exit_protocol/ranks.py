"""The exit protocol as the ranks use it: `prepare_rank` in every rank, `RankZeroExit` around the driver."""

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
from asyncrl.exit_protocol.policy import GRACEFUL_SIGNAL, STOP_SIGNALS, RankPolicy, RankZeroPolicy
from asyncrl.exit_protocol.watch import ExitWatch
from asyncrl.host.proc import die_with_parent


def prepare_rank(stop_grace_s: float = 12.0, environ: Mapping[str, str] = os.environ) -> RankExit | None:
    """First thing in every rank, before heavy imports: it dies with its agent; ranks >= 1 also arm their `RankExit`."""
    arm_parent_death(environ)
    return RankExit(stop_grace_s, environ) if int(environ.get("RANK", "0")) > 0 else None


def arm_parent_death(environ: Mapping[str, str] = os.environ) -> None:
    """Under torchrun: the kernel SIGKILLs this rank when the agent ends. First thing in every rank.

    The agent starts its ranks from its main thread, so the signal does not come early. Started in any other way,
    the parent is a shell or a scheduler's step, which a job under nohup is meant to outlive: nothing is armed.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return
    parent = os.getppid()
    if parent == 1 and not _is_python(parent):
        parent = 0  # adopted by init before this line ran: the agent is dead already
    die_with_parent(parent)


def _is_python(pid: int) -> bool:
    """As the agent is; in a container it may be process 1."""
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False


_asked_early: list[int] = []
"""Graceful signals that came before there was a `RankZeroExit`."""


def keep_graceful_stop() -> None:
    """SIGUSR1, which would end this process, is kept for the `RankZeroExit` to come. Main thread, on rank 0."""
    signal.signal(GRACEFUL_SIGNAL, lambda signum, _frame: _asked_early.append(signum))


class RankZeroExit:
    """Rank 0's part: `with RankZeroExit(grace_s) as exit:` around the driver, inside its event loop.

    Run `exit.stop_on_signals(scope)` as a task; when the block has ended, `stopped_by` and `exit_code` say how.
    A stop that was ordered stays bounded after the block, until the process is gone.
    """

    def __init__(
        self,
        stop_grace_s: float,
        environ: Mapping[str, str] = os.environ,
        *,
        tell: Callable[[str], None] = lambda answer: None,
    ) -> None:
        """`tell` gets one line for the person who asked for a stop, from a thread, while the block lasts; it must not
        wait."""
        self._policy = RankZeroPolicy(stop_grace_s)
        self._world_size = int(environ.get("WORLD_SIZE", "1"))
        self._beacon_name = beacon_name(environ)
        self._beacon: socket.socket | None = None
        handled = _handled(environ, (*STOP_SIGNALS, GRACEFUL_SIGNAL))
        self._watch = ExitWatch(self._policy, "rank 0", handled, tell=tell)
        self.stop = self._policy.stop
        """Set by SIGUSR1; anything else that wants a graceful end may set it too."""

    @property
    def stopped_by(self) -> signal.Signals | None:
        """The signal that stops the job; None: there was none."""
        return self._policy.stopped_by

    @property
    def leave_by(self) -> float | None:
        """time.monotonic() at which the process leaves by force; None: nothing has ended it yet."""
        return self._policy.leave_by

    @property
    def exit_code(self) -> int | None:
        """128 + n after signal n; None when no signal stopped the job."""
        return self._policy.exit_code if self._policy.stopped_by is not None else None

    def __enter__(self) -> Self:
        if _asked_early:
            self.stop.request()
        if self._world_size > 1:
            self._beacon = light_beacon(self._beacon_name, self._world_size)
        self._watch.arm()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """The beacon stays lit until the process ends: ranks watch the process behind it."""
        if error is not None and self._policy.leave_by is None:
            self.expect_exit(1)
        self._watch.disarm(keep_deadline=self._policy.leave_by is not None)

    async def stop_on_signals(self, scope: anyio.CancelScope) -> None:
        """Cancels `scope` when a signal says stop (also one that came before this call).

        Cancelled itself, because something failed beside it, it bounds the end that follows.
        """
        try:
            await anyio.wait_readable(self._watch.orders)
            scope.cancel(f"stopped by {self._policy.stopped_by!s}")
        finally:
            if self._policy.leave_by is None:
                self.expect_exit(1)

    @contextmanager
    def bounded_end(self) -> Iterator[None]:
        """The job itself; in whatever way it ends, the time for what follows (disposal first) is bounded."""
        try:
            yield
        except BaseException as error:
            told = "" if isinstance(error, anyio.get_cancelled_exc_class()) else f"{type(error).__name__}: {error}"
            self.expect_exit(1, told)
            raise
        self.expect_exit(0)

    def expect_exit(self, exit_code: int, error: str = "") -> None:
        """The run is over: the process ends within some graces from now, or is ended with `exit_code`, naming `error`.

        May be called again for the next stage of the end; after a signal all of them share the grace that it began.
        """
        self._policy.expect_exit(exit_code, time.monotonic(), error)
        self._watch.wake()


class RankExit:
    """The part of ranks >= 1, armed by `prepare_rank` for the rest of the process."""

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
        """The configuration is known: from now on rank 0 has this long to lead a stop."""
        self._policy.stop_grace_s = stop_grace_s

    def expect_exit(self, exit_code: int) -> None:
        """The rank has done its work: it ends within the grace, or is ended with `exit_code`."""
        self._policy.expect_exit(exit_code, time.monotonic())
        self._watch.wake()


def _handled(environ: Mapping[str, str], signals: tuple[signal.Signals, ...]) -> tuple[signal.Signals, ...]:
    """Without torchrun (which takes SIGHUP for itself whatever nohup said), nohup's wish is respected."""
    if "TORCHELASTIC_RUN_ID" in environ or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        return signals
    return tuple(signum for signum in signals if signum != signal.SIGHUP)
