"""Ranks: the trainer ranks as rank 0 commands them, itself included.

Every rank executes every command; rank 0 does so in the trainer thread. A command has ended when every rank has
answered over its link (rank_link.py); no collective tells it.

        TrainGroup ── run(command) ──► Ranks ──► trainer thread: send over the command channel, then execute
                                         ▲                                   │ gloo broadcast
                                         └── rank link: Done, Failed ◄── ranks ≥ 1: receive, execute, answer

Invariants
- Commands run one after another, in the same order on all ranks, also when a caller is cancelled meanwhile.
- The first failure of any rank ends the waiting call within seconds, with a TrainerError that names the rank. From then
  on every call raises it at once. A failure while no call waits ends the task group.
- A rank that died is blamed before the ranks whose collectives broke because of it. Where no rank died, the error of
  rank 0 is told first, since rank 0 knows where files were written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.abc
import torch.distributed as dist

from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.errors import AsyncRLError, TrainerError
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import waiting
from asyncrl.tasks import Changes
from asyncrl.training.checkpoints.manifest import Wrote
from asyncrl.training.ranks import commands
from asyncrl.training.ranks.command_channel import CommandChannel
from asyncrl.training.ranks.commands import Command, RankState, Result
from asyncrl.training.ranks.failures import blame, error_of, error_of_hung, tried
from asyncrl.training.ranks.layout import RankEnvironment
from asyncrl.training.ranks.rank import join_as_rank_zero
from asyncrl.training.ranks.rank_link import LinkAddress, LinkServer, RankFailure, describe
from asyncrl.training.ranks.trainer_thread import ThreadCall, TrainerThread, TrainerThreadStatistics
from asyncrl.training.trainer_events import TrainerRankFailed
from asyncrl.weights.handover import OtherRanks
from asyncrl.weights.transfer import Sink

T = TypeVar("T")

SHUTDOWN_TIMEOUT_S = 5.0
_BLAME_GRACE_S = 0.5
"""How long a failure waits for news of a rank that died and caused it."""
_STACK_TIMEOUT_S = 2.0
_MEETING_MARGIN_S = 30.0
"""How much longer the whole of `join` may take than the meeting in it, which names the ranks that are missing."""


class Ranks:
    """See the module's docstring. Made and used in the event loop of rank 0.

    Args:
        state: rank 0's own part.
        task_group: serves the links to the other ranks; the failure of an idle rank is raised there.
        wrote: called when a rank has written its part of a checkpoint.
    """

    def __init__(
        self,
        config: Config,
        environment: RankEnvironment,
        state: RankState,
        *,
        task_group: anyio.abc.TaskGroup,
        events: EventLog,
        wrote: Callable[[int, Wrote], None],
    ) -> None:
        self._config = config
        self._environment = environment
        self._state = state
        self._task_group = task_group
        self._events = events
        self._thread = TrainerThread()
        self._changed = Changes()
        self._link = LinkServer(range(1, environment.world_size), self._changed.notify, wrote)
        self._serving: list[anyio.CancelScope] = []
        self._channel: CommandChannel | None = None
        self._seq = 0
        self._waiters = 0
        self._thread_failure: BaseException | None = None
        self.failure: AsyncRLError | None = None
        """The error that every further call raises."""

    @property
    def unbroken(self) -> bool:
        """Whether all ranks have met and none has failed."""
        return self._channel is not None and self.failure is None and not self._link.failures

    @property
    def others(self) -> OtherRanks:
        """The ranks that offer tensors to engines beside rank 0."""
        return self._link

    def thread_statistics(self) -> TrainerThreadStatistics:
        """The trainer thread's present call and queue."""
        return self._thread.statistics()

    async def join(self, timeout_s: float) -> None:
        """Meets the other ranks within `timeout_s`, and joins the process groups with them. It must be the first call.

        Raises TrainerError, which names the ranks that have not come.
        """
        address = await self._serve_links()
        what = "joining the process groups"
        join = partial(join_as_rank_zero, self._environment, self._config, address)
        joining = self._thread.submit(join, what=what, on_done=self._job_done)
        self._channel = await self._await(joining, seq=-1, what=what, timeout_s=timeout_s + _MEETING_MARGIN_S)

    async def run(
        self,
        command: Command,
        what: str,
        timeout_s: float | None = None,
        *,
        batch: RolloutBatch | None = None,
        sink: Sink | None = None,
        idle_s: Callable[[], float] = lambda: math.inf,
        on_executed: Callable[[Result], None] | None = None,
    ) -> Result:
        """Has every rank execute `command`; returns rank 0's result.

        Args:
            what: the command in words, for waits and errors.
            timeout_s: `train.step_timeout_s` by default.
            batch: travels to every rank with the command.
            sink: takes exported tensors on rank 0.
            idle_s: seconds since the command last went on, for one that may take long as long as it does go on.
            on_executed: called with its result once rank 0 has executed the command, also when the caller was cancelled
                meanwhile.

        Raises:
            TrainerError: a rank failed, died or hangs, now or earlier; or another AsyncRLError that a rank raised.
        """
        self.check()
        channel = self._channel
        if channel is None:
            raise TrainerError("the trainer was not initialised: await init() first")
        self._seq += 1
        seq = self._seq

        def execute() -> Result:
            if self._thread_failure is not None:  # of a command that was abandoned while it ran
                raise self._thread_failure
            try:
                channel.send(seq, command, batch)
                return self._state.execute(command, batch, sink)
            except BaseException as error:
                self._thread_failure = error
                raise

        job = self._thread.submit(execute, what=what, on_done=partial(self._job_done, on_executed=on_executed))
        return await self._await(job, seq, what, timeout_s or self._config.train.step_timeout_s, idle_s)

    async def settle(self) -> None:
        """Waits until rank 0 has executed the commands before, also cancelled ones; raises what failed in them."""
        self.check()

        def outcome() -> None:
            if self._thread_failure is not None:
                raise self._thread_failure

        what = "the step in progress"
        job = self._thread.submit(outcome, what=what, on_done=self._job_done)
        await self._await(job, seq=-1, what=what, timeout_s=self._config.train.step_timeout_s)

    async def call(self, function: Callable[..., T], *args: object, what: str, timeout_s: float) -> T:
        """Runs `function(*args)` in the trainer thread, after earlier calls. Raises TrainerError after `timeout_s`."""
        self.check()
        try:
            return await self._thread.call(function, *args, what=what, timeout_s=timeout_s)
        except TimeoutError as error:
            raise TrainerError(f"trainer rank 0: {error}; it is at:\n{self._thread.stack()}".rstrip()) from error

    def check(self) -> None:
        """Raises the failure of a rank, if there is one."""
        if self.failure is not None:
            raise self.failure
        if self._link.failures:
            blamed = self._link.failures[0]
            raise self._break(blamed, "idle", error_of(blamed, "idle"))

    async def end(self) -> None:
        """Ends the other ranks and the trainer thread; never hangs, never raises."""
        if self.unbroken:
            self._link.expect_leave()
            await tried("the end of the trainer ranks", self._leave, SHUTDOWN_TIMEOUT_S)
        await tried("telling the trainer ranks", lambda: self._link.end(timeout_s=1.0), 2.0)
        self._thread.close()
        for scope in self._serving:
            scope.cancel()

    async def _leave(self) -> None:
        await self.run(commands.Shutdown(), "shutting down", SHUTDOWN_TIMEOUT_S)
        await self._thread.call(
            dist.destroy_process_group, what="leaving the process groups", timeout_s=SHUTDOWN_TIMEOUT_S
        )

    async def _await(
        self,
        job: ThreadCall[T],
        seq: int,
        what: str,
        timeout_s: float,
        idle_s: Callable[[], float] = lambda: math.inf,
    ) -> T:
        """Waits until all ranks have finished command `seq`; returns rank 0's result, or raises why one did not."""
        self._waiters += 1
        left_s = timeout_s
        try:
            while True:
                try:
                    with waiting(what, "trainer", left_s):
                        await self._end_of(job, seq)
                    break
                except TimeoutError:
                    left_s = timeout_s - idle_s()
                    if left_s <= 0:
                        raise
        except TimeoutError as error:
            late = f"did not end within {timeout_s:g} s"
            if idle_s() < math.inf:
                late = f"did not go on for {timeout_s:g} s"
            hung = await self._fail_hung(job, seq, what, late)
            job.abandon()
            raise hung from error
        except BaseException:
            job.abandon()
            raise
        else:
            if self._link.failures or job.exception is not None:
                raise await self._fail(job, what)
            return job.result()
        finally:
            self._waiters -= 1

    async def _end_of(self, job: ThreadCall[Any], seq: int) -> None:
        while not self._link.failures and not (job.done and self._all_done(seq)):
            if job.done and job.exception is not None:
                break
            await self._changed.wait()

    def _all_done(self, seq: int) -> bool:
        return all(done >= seq for done in self._link.done.values())

    async def _fail(self, job: ThreadCall[Any], what: str) -> AsyncRLError:
        """The failure to report, after a moment in which news of a dead rank may still come."""
        with anyio.move_on_after(_BLAME_GRACE_S if self._environment.world_size > 1 else 0):
            while not any(f.died for f in self._link.failures):
                await self._changed.wait()
        if not job.done:
            job.abandon()
        blamed, error = blame(self._link.failures, job.exception if job.done else None, what)
        return self._break(blamed, what, error)

    async def _fail_hung(self, job: ThreadCall[Any], seq: int, what: str, late: str) -> AsyncRLError:
        """The failure that names the ranks that did not finish, with their stacks."""
        await self._link.ask_stacks(_STACK_TIMEOUT_S)
        hung = {rank: self._link.stacks.get(rank) for rank, done in self._link.done.items() if done < seq}
        blamed = next(iter(hung), 0)
        if not job.done:
            hung = {0: self._thread.stack(), **hung}
        return self._break(RankFailure(blamed, "hangs", what), what, error_of_hung(hung, what, late))

    def _break(self, failure: RankFailure, what: str, error: AsyncRLError) -> AsyncRLError:
        if self.failure is None:
            self.failure = error
            self._events.emit(TrainerRankFailed(rank=failure.rank, command=what, reason=str(failure)))
        return self.failure

    # the other ranks

    def _job_done(self, job: ThreadCall[Any], on_executed: Callable[[Result], None] | None = None) -> None:
        if job.exception is None and on_executed is not None:
            on_executed(job.result())
        if job.abandoned and job.exception is not None:
            failure = describe(0, job.exception)
            self._break(failure, job.what, error_of(failure, job.what))
        self._changed.notify()

    async def _serve_links(self) -> LinkAddress | None:
        if self._environment.world_size == 1:
            return None
        address: LinkAddress = await self._task_group.start(self._links)
        self._task_group.start_soon(self._watch)
        return address

    async def _links(self, *, task_status: anyio.abc.TaskStatus[LinkAddress]) -> None:
        with anyio.CancelScope() as scope:
            self._serving.append(scope)
            await self._link.serve(self._environment.link_host, task_status=task_status)

    async def _watch(self) -> None:
        """Raises the failure of a rank into the task group when no call waits that would raise it."""
        with anyio.CancelScope() as scope:
            self._serving.append(scope)
            while True:
                await self._changed.wait()
                if self._waiters == 0 and self.failure is None:
                    self.check()
