"""TrainGroup: the trainer as the loop sees it, over any number of ranks.

Each call becomes one command that every rank executes; rank 0 does so in the trainer thread. The call ends when
every rank has answered over its link (rank_link.py), not when some collective says so.

Invariants
- Commands run one after another on all ranks in the same order, whoever cancels or gives up meanwhile.
- The first failure of any rank ends the waiting call within seconds, with a TrainerError that names the rank; from
  then on every call raises it at once. A failure while nobody waits ends the task group.
- A rank that died is blamed before the ranks whose collectives broke because of it; where nobody died, what rank 0
  itself has to say comes first: it knows where things were written.
- A weight transfer that fails is no failure of a rank: the export was walked to its end everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
import anyio.abc
import torch.distributed as dist
from torch import Tensor

from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.staleness import Bound
from asyncrl.errors import AsyncRLError, TrainerError, WeightUpdateError
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import waiting
from asyncrl.training import commands
from asyncrl.training.checkpoints.restoring import saved_tensors
from asyncrl.training.checkpoints.saver import CheckpointSaver
from asyncrl.training.checkpoints.store import SavedCheckpoint
from asyncrl.training.command_channel import CommandChannel
from asyncrl.training.commands import Command, ExportOutcome, RankState, Result, TrainerFactory
from asyncrl.training.events import TrainerRankFailed, TrainerReady, TrainerResumed, TrainerStepped
from asyncrl.training.failures import blame, error_of, error_of_hung, tried
from asyncrl.training.rank import RankEnvironment, join_as_rank_zero
from asyncrl.training.rank_link import LinkAddress, LinkServer, RankFailure, describe
from asyncrl.training.statistics import TrainGroupStatistics
from asyncrl.training.trainer_thread import Job, TrainerThread
from asyncrl.weights.buckets import TensorSpec
from asyncrl.weights.copies import Copies
from asyncrl.weights.publication import Fleet, PublicationReport, longest_begin_s, publish
from asyncrl.weights.transfer import Sink, Transport

T = TypeVar("T")

BLAME_GRACE_S = 0.5
"""How long a failure waits for news of a rank that died and caused it."""
STACK_TIMEOUT_S = 2.0
SHUTDOWN_TIMEOUT_S = 5.0


class TrainGroup:
    """See the module's docstring. Made and used in the event loop of rank 0.

    Args:
        task_group: where the links to the other ranks are served, and where the failure of an idle rank surfaces.
        make_trainer: builds the trainer of a rank; the other ranks are given the same one (`serve_rank`).
        fleet, transport: for `update_weights`; without them only training works.
        events: its attempt is the first part of every weight version.
        first_attempt: the first of this job's gang; None where that is the present one.
    """

    def __init__(
        self,
        config: Config,
        *,
        task_group: anyio.abc.TaskGroup,
        make_trainer: TrainerFactory,
        events: EventLog,
        fleet: Fleet | None = None,
        transport: Transport | None = None,
        copies: Copies | None = None,
        first_attempt: int | None = None,
        environment: RankEnvironment | None = None,
    ) -> None:
        self._config = config
        self._task_group = task_group
        self._events = events
        self._fleet = fleet
        self._transport = transport
        self._copies = copies
        self._environment = environment or RankEnvironment.from_environ()
        self._thread = TrainerThread()
        self._bound = Bound.of(config)
        layout = self._environment.layout(config)
        self._checkpoints = CheckpointSaver(
            config, layout, events=events, task_group=task_group, first_attempt=first_attempt
        )
        self._state = RankState(config, layout, make_trainer, self._checkpoints.report)
        self._link = LinkServer(range(1, layout.world_size), self._wake, self._checkpoints.wrote)
        self._serving: list[anyio.CancelScope] = []
        self._channel: CommandChannel | None = None
        self._changed = anyio.Event()
        self._seq = 0
        self._waiters = 0
        self._step = 0
        self._specs: tuple[TensorSpec, ...] = ()
        self._failure: AsyncRLError | None = None
        self._thread_failure: BaseException | None = None
        self._disposed = False
        self.resumed: SavedCheckpoint | None = None
        """What `init` began from, with the files that others had added; None where it began from the model."""

    # the loop's calls

    async def init(self) -> int:
        """Joins the process groups and builds the trainer on every rank; returns the first rollout id.

        Raises CheckpointError where `checkpoint.resume` finds a checkpoint that training cannot go on from.
        """
        started = time.monotonic()
        timeout_s = self._config.train.init_timeout_s
        address = await self._serve_links()
        what = "joining the process groups"
        join = partial(join_as_rank_zero, self._environment, self._config, address)
        joining = self._thread.submit(join, what=what, on_done=self._job_done)
        self._channel = await self._await(joining, seq=-1, what=what, timeout_s=timeout_s)
        resumed = await self._checkpoints.resume()
        init = commands.Init(str(self._config.run.dir), None if resumed is None else str(resumed.path))
        specs = await self._run(init, "building the trainer", timeout_s)
        self._specs = cast(tuple[TensorSpec, ...], specs)
        if resumed is not None:
            self.resumed, self._step = resumed, resumed.step
            self._events.emit(TrainerResumed(step=resumed.step, path=str(resumed.path)))
        ranks, tensors, size = self._environment.world_size, len(self._specs), sum(s.size_bytes for s in self._specs)
        ready = TrainerReady(ranks=ranks, tensors=tensors, bytes=size, seconds=time.monotonic() - started)
        self._events.emit(ready)
        return self._step

    async def train(self, rollout_id: int, batch: RolloutBatch) -> dict[str, float]:
        """Trains on one rollout batch; returns rank 0's metrics. StalenessError for a batch that is too old."""
        if not self._config.debug.train_only:  # which trains what was saved, as it was saved
            self._bound.check(batch)
        return await self._train(rollout_id, commands.Train(), batch)

    async def train_sft(self, rollout_id: int | None, batch: RolloutBatch, lr: float) -> dict[str, float]:
        """One supervised step on the response tokens of `batch`; returns rank 0's metrics.

        It trains rollout `rollout_id`, as `train` does. None: it is no step of the loop but one of a warm-up, and none
        of what is counted in steps moves.
        """
        return await self._train(rollout_id, commands.TrainSft(lr), batch)

    async def reset_optimizer(self) -> None:
        await self._run(commands.ResetOptimizer(), "resetting the optimizer")

    async def logprobs(self, batch: RolloutBatch) -> Tensor:
        """float32 [R]: the policy's log-prob of each response token, at the batch's temperature."""
        return cast(Tensor, await self._run(commands.Logprobs(), "computing log-probs", batch=batch))

    async def update_weights(self, rollout_id: int | None = None) -> PublicationReport | None:
        """Publishes the present weights to the fleet as version `attempt.step`; `rollout_id` is the last one trained.

        None is for trainers without engines (asyncrl.debugging). Raises WeightUpdateError where no engine gets them.
        """
        if self._fleet is None or self._transport is None:
            raise WeightUpdateError("this trainer was built without engines: there is nobody to publish weights to")
        step = self._step if rollout_id is None else rollout_id + 1
        return await publish(
            self._fleet,
            self,
            self._transport,
            version=f"{self._events.attempt}.{step}",
            attempts=self._config.weights.attempts,
            events=self._events,
            copies=self._copies,
            begin_timeout_s=longest_begin_s(self._config),
        )

    async def export_hf(self, directory: Path) -> None:
        """Writes the policy as a Hugging Face directory, all at once or not at all."""
        await self._run(commands.ExportHf(str(directory)), f"exporting to {directory}")

    async def save_model(self, rollout_id: int) -> Path:
        """Writes the policy after rollout `rollout_id` under the run directory; weights only, no optimizer state."""
        directory = self._config.run.dir / "models" / f"step-{rollout_id + 1:06d}"
        await self.export_hf(directory)
        return directory

    async def save_checkpoint(
        self, rollout_id: int, extra: Mapping[str, bytes] | None = None, *, wait: bool = False
    ) -> Path | None:
        """Saves what training needs to go on after rollout `rollout_id`, and the files `extra` of others with it.

        Returns once every rank has copied its state, with the directory that will appear when all is written; or None,
        with a warning, for a checkpoint that could not be begun, as where the former one is still being written.
        With `wait`, waits for the former one first and then for this one: None means that it was not written.
        """
        return await self._checkpoints.save(
            rollout_id + 1,
            lambda number, directory: self._run(commands.SaveCheckpoint(number, str(directory)), "copying the state"),
            tensors=saved_tensors(self._specs),
            extra=extra or {},
            wait=wait,
        )

    async def finish_checkpoint(self) -> None:
        """Waits for the checkpoint that is being written, `checkpoint.timeout_s` at most; `statistics` tells of it."""
        await self._checkpoints.finish()

    async def offload(self, *, keep_weights: bool = False) -> None:
        """Frees the GPUs of the trainer, except for the weights where they are still to be published or exported."""
        await self._run(commands.Offload(keep_weights), "offloading the trainer")

    async def onload(self) -> None:
        """Undoes `offload`, before the next training step or export."""
        await self._run(commands.Onload(), "loading the trainer back")

    async def clear_memory(self) -> None:
        await self._run(commands.ClearMemory(), "clearing memory")

    def statistics(self) -> TrainGroupStatistics:
        failure = None if self._failure is None else str(self._failure)
        saved, saving = self._checkpoints.newest, self._checkpoints.saving
        return TrainGroupStatistics(self._thread.statistics(), self._step, failure, saved, saving)

    async def dispose(self) -> None:
        """Ends transport, other ranks and trainer thread; never hangs, never raises. Idempotent."""
        if self._disposed:
            return
        self._disposed = True
        with anyio.CancelScope(shield=True):
            if self._transport is not None:
                await tried("closing the weight transport", self._transport.aclose, SHUTDOWN_TIMEOUT_S)
            if self._channel is not None and self._failure is None and not self._link.failures:
                await tried("the checkpoint in progress", self._checkpoints.finish, SHUTDOWN_TIMEOUT_S)
                self._link.expect_leave()
                await tried("the end of the trainer ranks", self._leave, SHUTDOWN_TIMEOUT_S)
            await tried("telling the trainer ranks", lambda: self._link.end(timeout_s=1.0), 2.0)
        self._thread.close()
        self._checkpoints.close()
        for scope in self._serving:
            scope.cancel()

    async def _leave(self) -> None:
        await self._run(commands.Shutdown(), "shutting down", SHUTDOWN_TIMEOUT_S)
        await self._thread.call(
            dist.destroy_process_group, what="leaving the process groups", timeout_s=SHUTDOWN_TIMEOUT_S
        )

    # the weight plane's view (asyncrl.weights.transfer.WeightSource)

    @property
    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        return self._specs

    async def call(self, function: Callable[..., T], *args: object, what: str, timeout_s: float) -> T:
        self._check()
        try:
            return await self._thread.call(function, *args, what=what, timeout_s=timeout_s)
        except TimeoutError as error:
            raise TrainerError(f"trainer rank 0: {error}; it is at:\n{self._thread.stack()}".rstrip()) from error

    async def export(self, sink: Sink, timeout_s: float) -> None:
        outcome = await self._run(commands.ExportTensors(), "exporting the weights", timeout_s, sink=sink)
        assert isinstance(outcome, ExportOutcome)
        if outcome.sink_error is not None:
            raise outcome.sink_error

    # commands

    async def _train(self, rollout_id: int | None, command: Command, batch: RolloutBatch) -> dict[str, float]:
        """Has every rank train; counts the step where it is one of the loop."""
        what = "a supervised step" if rollout_id is None else f"training on rollout {rollout_id}"
        started = time.monotonic()
        metrics = cast(dict[str, float], await self._run(command, what, batch=batch))
        if rollout_id is not None:
            self._step, seconds = rollout_id + 1, time.monotonic() - started
            self._events.emit(TrainerStepped(rollout_id=rollout_id, step=self._step, seconds=seconds))
        return metrics

    async def _run(
        self,
        command: Command,
        what: str,
        timeout_s: float | None = None,
        *,
        batch: RolloutBatch | None = None,
        sink: Sink | None = None,
    ) -> Result:
        """Has every rank execute `command`; returns rank 0's result."""
        self._check()
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

        job = self._thread.submit(execute, what=what, on_done=self._job_done)
        return await self._await(job, seq, what, timeout_s or self._config.train.step_timeout_s)

    async def _await(self, job: Job[T], seq: int, what: str, timeout_s: float) -> T:
        """Until rank 0 and every other rank have finished command `seq`, or one failed, or time is up."""
        self._waiters += 1
        try:
            with waiting(what, "trainer", timeout_s):
                while not self._link.failures and not (job.done and self._all_done(seq)):
                    if job.done and job.exception is not None:
                        break
                    await self._changed.wait()
        except TimeoutError as error:
            hung = await self._fail_hung(job, seq, what, timeout_s)
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

    def _all_done(self, seq: int) -> bool:
        return all(done >= seq for done in self._link.done.values())

    async def _fail(self, job: Job[Any], what: str) -> AsyncRLError:
        """The failure to report, once there was time to hear of a rank that died, or of rank 0's own view."""
        with anyio.move_on_after(BLAME_GRACE_S if self._environment.world_size > 1 else 0):
            while not any(f.died for f in self._link.failures):
                await self._changed.wait()
        if not job.done:
            job.abandon()
        blamed, error = blame(self._link.failures, job.exception if job.done else None, what)
        return self._break(blamed, what, error)

    async def _fail_hung(self, job: Job[Any], seq: int, what: str, timeout_s: float) -> AsyncRLError:
        """Names the ranks that did not finish, and where they are."""
        await self._link.ask_stacks(STACK_TIMEOUT_S)
        hung = {rank: self._link.stacks.get(rank) for rank, done in self._link.done.items() if done < seq}
        blamed = next(iter(hung), 0)
        if not job.done:
            hung = {0: self._thread.stack(), **hung}
        return self._break(RankFailure(blamed, "hangs", what), what, error_of_hung(hung, what, timeout_s))

    def _break(self, failure: RankFailure, what: str, error: AsyncRLError) -> AsyncRLError:
        if self._failure is None:
            self._failure = error
            self._events.emit(TrainerRankFailed(rank=failure.rank, command=what, reason=str(failure)))
        return self._failure

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._link.failures:
            blamed = self._link.failures[0]
            raise self._break(blamed, "idle", error_of(blamed, "idle"))

    # links

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    def _job_done(self, job: Job[Any]) -> None:
        if job.abandoned and job.exception is not None:
            failure = describe(0, job.exception)
            self._break(failure, job.what, error_of(failure, job.what))
        self._wake()

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
        """Raises the failure of a rank into the task group when no call is there to raise it."""
        with anyio.CancelScope() as scope:
            self._serving.append(scope)
            while True:
                await self._changed.wait()
                if self._waiters == 0 and self._failure is None:
                    self._check()
