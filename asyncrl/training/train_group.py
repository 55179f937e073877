"""TrainGroup: the trainer as the loop sees it, over any number of ranks.

Each call becomes one command that every rank executes (ranks.py). Calls that name no role are for the actor.

Invariants
- A step that was begun is trained, also when its caller is cancelled; `settle` tells whether it was.
- A failed weight transfer is no failure of a rank: every rank has walked through the export to its end.
- The algorithm's columns are computed once, on rank 0, before any rank begins the step.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import anyio
import anyio.abc
from torch import Tensor

from asyncrl.algorithms.chosen import make_algorithm
from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.staleness import Bound
from asyncrl.errors import ExportError, TrainerError, WeightUpdateError
from asyncrl.observability.events import EventLog
from asyncrl.tasks import Background
from asyncrl.training.backends import make_backend
from asyncrl.training.checkpoints.restoring import saved_tensors
from asyncrl.training.checkpoints.saver import CheckpointSaver
from asyncrl.training.checkpoints.store import SavedCheckpoint
from asyncrl.training.last_policy import keep_leftovers, leave_policy
from asyncrl.training.learner.backend import BackendFactory
from asyncrl.training.preparation import Preparation
from asyncrl.training.ranks import commands
from asyncrl.training.ranks.commands import Command, ExportOutcome, RankState, Result
from asyncrl.training.ranks.failures import tried
from asyncrl.training.ranks.layout import RankEnvironment
from asyncrl.training.ranks.ranks import SHUTDOWN_TIMEOUT_S, Ranks
from asyncrl.training.roles import ACTOR, Role
from asyncrl.training.statistics import TrainGroupStatistics
from asyncrl.training.trainer_events import TrainerReady, TrainerResumed, TrainerStepped
from asyncrl.weights.buckets import TensorSpec
from asyncrl.weights.handover import Handover, OtherRanks
from asyncrl.weights.publication import PublicationReport
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.transfer import Payload, Sink, WatchedSink, WeightSource

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Publishing:
    """How a trainer publishes its weights."""

    make_publisher: Callable[[WeightSource], Publisher]
    """Makes the publisher of the trainer that it is given."""
    version_of: Callable[[int], str]
    """The version of weights that so many steps have trained: `RunDirectory.weight_version`."""


class TrainGroup:
    """See the module's docstring. Made and used in the event loop of rank 0.

    Args:
        task_group: serves the links to the other ranks; the failure of an idle rank is raised there.
        background: the tasks of the job, among which checkpoints are completed; None makes one in `task_group`.
        publishing: how `update_weights` publishes; None for a trainer without engines.
        first_attempt: the first attempt of this job's gang; None where that is the present one.
        roles: those beside the actor, whose model is `config.model.path`, and beside those that the algorithm needs.
        make_backend: makes a rank's part of the backend; the other ranks must be given the same one (`serve_rank`).

    Raises ConfigError for an algorithm that cannot be made.
    """

    def __init__(
        self,
        config: Config,
        *,
        task_group: anyio.abc.TaskGroup,
        events: EventLog,
        background: Background | None = None,
        publishing: Publishing | None = None,
        first_attempt: int | None = None,
        roles: Sequence[Role] = (),
        make_backend: BackendFactory = make_backend,
    ) -> None:
        self._config = config
        self._events = events
        self._publishing = publishing
        self._publisher = None if publishing is None else publishing.make_publisher(self)
        self._environment = environment = RankEnvironment.from_environ()
        self._bound = Bound.of(config)
        self._preparation = Preparation(
            config, make_algorithm(config), events, logprobs=self.logprobs, refresh=self._refresh
        )
        all_roles = (Role(ACTOR, str(config.model.path)), *self._preparation.roles, *roles)
        self._roles = {role.name: role for role in all_roles}
        layout = environment.layout(config)
        self._checkpoints = CheckpointSaver(
            config,
            layout,
            events=events,
            background=background or Background(task_group),
            first_attempt=first_attempt,
        )
        state = RankState(config, layout, make_backend, self._checkpoints.report)
        self._ranks = Ranks(
            config, environment, state, task_group=task_group, events=events, wrote=self._checkpoints.wrote
        )
        self._step = 0
        self._begun = False
        """A step of the loop was begun, and no call has returned from it."""
        self._executed: tuple[int, float] | None = None
        """A step of the loop that rank 0 has executed and that is not counted yet: rollout id, and when it began."""
        self._specs: dict[str, tuple[TensorSpec, ...]] = {}
        """By role; empty before `init`."""
        self._exported = 0
        """Steps behind the newest export."""
        self._disposed = False
        self.resumed: SavedCheckpoint | None = None
        """The checkpoint that `init` began from, with the files of other parts; None where it began from the model."""

    # the loop's calls

    async def init(self, *, threads: int | None = None) -> int:
        """Joins the process groups and builds the trainer on every rank; returns the first rollout id.

        `threads`: with how many threads each rank computes on CPU; None leaves it to torch.

        Raises CheckpointError where `checkpoint.resume` finds a checkpoint that training cannot go on from.
        """
        started = time.monotonic()
        timeout_s = self._config.train.init_timeout_s
        await self._ranks.join(timeout_s)
        resumed = await self._checkpoints.resume(self._roles)
        run_dir, path = str(self._config.run.dir), None if resumed is None else str(resumed.path)
        for name, role in self._roles.items():
            build = commands.Build(role, run_dir, path, threads)
            specs = await self._ranks.run(build, self._of(name, "building the trainer"), timeout_s)
            self._specs[name] = cast(tuple[TensorSpec, ...], specs)
        if resumed is not None:
            self.resumed, self._step = resumed, resumed.step
            self._preparation.restore(resumed.extra)
            self._events.emit(
                TrainerResumed(step=resumed.step, path=str(resumed.path), other_layout=resumed.other_layout)
            )
        elif self._publisher is not None and self._events.attempt > 0:
            await keep_leftovers(self._publisher, self._config)
        payload, seconds = self.payload, time.monotonic() - started
        ranks, tensors, size = self._environment.world_size, len(payload.specs), payload.size_bytes
        ready = TrainerReady(ranks=ranks, tensors=tensors, bytes=size, seconds=seconds)
        self._events.emit(ready)
        return self._step

    async def train(self, rollout_id: int, batch: RolloutBatch) -> dict[str, float]:
        """Trains on one rollout batch; returns rank 0's metrics.

        Call it once for each rollout: from then on the rollout counts as trained, also when a signal stops the job.

        Raises:
            StalenessError: the batch is too old. No rank has begun the step.
            AlgorithmError: the algorithm failed. Where it failed in `columns`, no rank has begun the step.
        """
        if not self._config.debug.train_only:  # a replay trains saved batches as they are
            self._bound.check(batch)
        batch, figures = await self._preparation.prepare(rollout_id, batch)
        metrics = await self._train(rollout_id, commands.Train(ACTOR), batch)
        return metrics | {f"train/{name}": value for name, value in figures.items()}

    async def train_sft(self, rollout_id: int | None, batch: RolloutBatch, lr: float) -> dict[str, float]:
        """One supervised step on the sampled tokens of `batch`; returns rank 0's metrics.

        Args:
            rollout_id: the rollout that the step trains, once, as `train` does. None: it is a step of a warm-up, which
                counts nowhere.
        """
        return await self._train(rollout_id, commands.TrainSft(ACTOR, lr), batch)

    async def settle(self) -> int:
        """Waits for the step whose caller was cancelled, if there is one; returns the number of trained steps.

        Raises what failed in it.
        """
        if self._begun:
            await self._ranks.settle()
            self._count()
            self._begun = False
        return self._step

    async def reset_optimizer(self) -> None:
        """Forgets the optimizer's moments and step count; the weights stay."""
        await self._ranks.run(commands.ResetOptimizer(ACTOR), "resetting the optimizer")

    async def logprobs(self, batch: RolloutBatch, role: str = ACTOR) -> Tensor:
        """float32 [T]: the role's log-prob of each sampled token, at the batch's temperature; 0 for context."""
        what = self._of(role, "computing log-probs")
        return cast(Tensor, await self._ranks.run(commands.Logprobs(role), what, batch=batch))

    async def update_weights(self, rollout_id: int | None = None) -> PublicationReport | None:
        """Publishes the present weights to the fleet as version `attempt.step`.

        Args:
            rollout_id: the last rollout that was trained; None publishes the weights that training began with.

        Returns:
            The report; None from trainers without engines (asyncrl.debugging).

        Raises:
            WeightUpdateError: no engine has got the weights.
        """
        if self._publishing is None or self._publisher is None:
            raise WeightUpdateError("this trainer was built without engines: there is nobody to publish weights to")
        step = self._step if rollout_id is None else rollout_id + 1
        return await self._publisher.publish(self._publishing.version_of(step))

    async def export_hf(self, directory: Path) -> None:
        """Writes the policy as a Hugging Face directory, all at once or not at all.

        Raises ExportError where the disk does not take it; the trainer is whole, and may export again.
        """
        outcome = await self._ranks.run(commands.ExportHf(ACTOR, str(directory)), f"exporting to {directory}")
        assert isinstance(outcome, ExportOutcome)
        if outcome.error is not None:
            raise ExportError(
                f"the policy of step {self._step} was not exported: {directory} could not be written "
                f"({outcome.error}); make room on its disk, or choose another with --run.dir"
            ) from outcome.error
        self._exported = self._step

    async def save_model(self, rollout_id: int) -> Path:
        """Writes the policy after rollout `rollout_id` under the run directory; weights only, no optimizer state."""
        directory = self._config.run.dir / "models" / f"step-{rollout_id + 1:06d}"
        await self.export_hf(directory)
        return directory

    async def save_checkpoint(
        self, rollout_id: int, extra: Mapping[str, bytes] | None = None, *, wait: bool = False
    ) -> Path | None:
        """Saves the state after rollout `rollout_id`, and the files `extra` of other parts of the job with it.

        Args:
            wait: wait for an earlier checkpoint in progress, and then for this one.

        Returns:
            Once every rank has copied its state: the directory that will appear when everything is written. None, with
            a warning, where the checkpoint could not be begun, for example since an earlier one is in progress. With
            `wait`, None means that it was not written.
        """

        def copy(number: int, staging: Path) -> Awaitable[object]:
            return self._ranks.run(commands.SaveCheckpoint(number, str(staging)), "copying the state")

        return await self._checkpoints.save(
            rollout_id + 1,
            copy,
            roles={role: saved_tensors(specs) for role, specs in self._specs.items()},
            extra={**(extra or {}), **self._preparation.save()},
            wait=wait,
        )

    async def finish_checkpoint(self) -> None:
        """Waits for the checkpoint in progress, `checkpoint.timeout_s` at most; `statistics` tells its outcome."""
        await self._checkpoints.finish()

    async def offload(self, *, keep_weights: bool = False, role: str | None = None) -> None:
        """Frees the GPUs of a role, or of all; `keep_weights` leaves the policy's there, to be published."""
        for name in self._roles if role is None else (role,):
            keep = keep_weights and name == ACTOR
            await self._ranks.run(commands.Offload(name, keep), self._of(name, "offloading the trainer"))

    async def onload(self, role: str | None = None) -> None:
        """Undoes `offload`, before a role computes or exports anything."""
        for name in self._roles if role is None else (role,):
            await self._ranks.run(commands.Onload(name), self._of(name, "loading the trainer back"))

    async def clear_memory(self) -> None:
        """Has every rank give back memory that Python and the GPU's allocator hold in reserve."""
        await self._ranks.run(commands.ClearMemory(), "clearing memory")

    def statistics(self) -> TrainGroupStatistics:
        """What the trainer does right now, and how far it has come."""
        failure = None if self._ranks.failure is None else str(self._ranks.failure)
        saved, saving = self._checkpoints.newest, self._checkpoints.saving
        return TrainGroupStatistics(self._ranks.thread_statistics(), self._step, failure, saved, saving)

    async def dispose(self) -> None:
        """Closes the transport and ends the other ranks and the trainer thread. Never hangs or raises. Idempotent."""
        if self._disposed:
            return
        self._disposed = True
        with anyio.CancelScope(shield=True):
            if self._ranks.unbroken:
                await tried("the checkpoint in progress", self._checkpoints.finish, SHUTDOWN_TIMEOUT_S)
            if self._publisher is not None:
                leave, close = partial(self._leave_policy, self._publisher), self._publisher.aclose
                await tried("keeping the policy", leave, SHUTDOWN_TIMEOUT_S)
                await tried("closing the weight transport", close, SHUTDOWN_TIMEOUT_S, self._ranks.failure)
            await self._ranks.end()
        self._checkpoints.close()

    async def _leave_policy(self, publisher: Publisher) -> None:
        newest, resumed = self._checkpoints.newest, self.resumed
        saved = max(self._exported, 0 if newest is None else newest.step, 0 if resumed is None else resumed.step)
        await leave_policy(publisher, self._config, self._events, trained=self._step, saved=saved)

    # the weight plane's view (asyncrl.weights.transfer.WeightSource)

    @property
    def payload(self) -> Payload:
        """The full weights of the policy; known after `init`."""
        return Payload(self._specs.get(ACTOR, ()), self.export)

    async def call(self, function: Callable[..., T], *args: object, what: str, timeout_s: float) -> T:
        """Runs `function(*args)` in the trainer thread of rank 0. Raises TrainerError after `timeout_s`."""
        return await self._ranks.call(function, *args, what=what, timeout_s=timeout_s)

    @property
    def other_ranks(self) -> OtherRanks:
        """The ranks that may offer their tensors to engines beside rank 0."""
        return self._ranks.others

    async def export(self, sink: Sink, timeout_s: float, handover: Handover | None = None) -> None:
        """Exports the policy once, on all ranks, into `sink` on rank 0; raises as `Payload.export` does."""
        command, watched = commands.ExportTensors(ACTOR, handover), WatchedSink(sink)
        outcome = await self._ranks.run(
            command, "exporting the weights", timeout_s, sink=watched, idle_s=watched.idle_s
        )
        assert isinstance(outcome, ExportOutcome)
        if outcome.error is not None:
            raise outcome.error

    # steps

    async def _refresh(self, role: str) -> None:
        what = self._of(role, "taking over the policy's weights")
        await self._ranks.run(commands.CopyWeights(role, ACTOR), what)

    async def _train(self, rollout_id: int | None, command: Command, batch: RolloutBatch) -> dict[str, float]:
        """Has every rank train; counts the step where it is one of the loop."""
        what = "a supervised step" if rollout_id is None else f"training on rollout {rollout_id}"
        started = time.monotonic()

        def executed(metrics: Result) -> None:
            self._count()  # an earlier one, whose caller was cancelled
            if rollout_id is not None:
                self._executed = rollout_id, started
                self._preparation.trained(rollout_id, cast(dict[str, float], metrics))

        self._begun = self._begun or rollout_id is not None
        metrics = await self._ranks.run(command, what, batch=batch, on_executed=executed)
        self._count()
        return cast(dict[str, float], metrics)

    def _count(self) -> None:
        """Counts a step that rank 0 has executed; the other ranks execute it before any later command."""
        if self._executed is not None:
            (rollout_id, started), self._executed, self._begun = self._executed, None, False
            self._step, seconds = rollout_id + 1, time.monotonic() - started
            self._events.emit(TrainerStepped(rollout_id=rollout_id, step=self._step, seconds=seconds))

    def _of(self, role: str, what: str) -> str:
        """A command in words, with the role where it is not the actor. Raises TrainerError for an unknown role."""
        if role not in self._roles:
            raise TrainerError(f"this trainer has no role {role!r}; it has {', '.join(self._roles)}")
        return what if role == ACTOR else f"{what} (role {role})"
