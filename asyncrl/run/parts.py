"""The parts of a run, as its loop sees them: what it asks of the engines, of the executor and of the trainer.

Each part has its real form and a stand-in for half a job (`asyncrl.debugging`). Both have these methods, and the type
checker holds them to it. The methods are described where they are real: `InferenceController`, `RolloutExecutor` and
`TrainGroup`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from asyncrl.data.fleet import FleetView, UpdateAck, UpdateLease

if TYPE_CHECKING:  # torch stays out of the driver until the engines are on their way
    from asyncrl.data.batch import RolloutBatch
    from asyncrl.rollout.evaluation import EvalReport
    from asyncrl.rollout.metrics import RolloutMetrics
    from asyncrl.rollout.scheduling.ledger import Reached
    from asyncrl.training.checkpoints.store import SavedCheckpoint
    from asyncrl.training.statistics import TrainGroupStatistics
    from asyncrl.weights.publication import PublicationReport
    from asyncrl.weights.transfer import WeightReceiver


class ServingFleet(Protocol):
    """Engines that take new weights, and tell how they are."""

    def fleet(self) -> FleetView:
        """Addresses, states and versions as they are now."""

    def copies_in_use(self) -> frozenset[Path]:
        """Directories of weights that are to stay as they are."""

    async def begin_weight_update(self, version: str) -> UpdateLease:
        """Pauses the engines and opens them for weights `version`."""

    async def commit_weight_update(
        self, lease_id: str, acks: Sequence[UpdateAck], directory: Path | None, *, copy_due: float | None = None
    ) -> None:
        """Makes the engines that acknowledged serve the version of the lease.

        `directory` holds a copy of the weights, or will hold it by `copy_due` (anyio.current_time).
        """

    def copy_written(self, directory: Path, complete: bool) -> None:
        """Tells that the copy of a commit is complete, or was given up."""

    async def abort_weight_update(self, lease_id: str, failed: Mapping[str, str], *, untouched: bool) -> None:
        """Gives the engines back to the fleet."""


class InferencePart(ServingFleet, Protocol):
    """The engines; an `InferenceController` is one."""

    def open_engine(self, engine_id: str, url: str) -> AbstractAsyncContextManager[WeightReceiver]:
        """A client that carries weights into the engine at `url`, with the job's key where it needs one."""

    async def wait_ready(self) -> None:
        """Returns when every engine has generated."""

    async def prepare_rollout(self, rollout_id: int) -> None:
        """Returns when some engine serves. Raises EngineError where none will."""

    async def prepare_eval(self) -> None:
        """As `prepare_rollout`, for an evaluation."""

    async def wait_publication_needed(self) -> None:
        """Returns once no engine holds the published weights and none can load them."""

    async def wait_updatable(self) -> None:
        """Returns when enough engines can take weights."""

    async def offload(self) -> None:
        """Engines pause and give up all of their memory on the trainer's GPUs."""

    async def offload_kv(self) -> None:
        """Engines pause and give up their memory on the trainer's GPUs, except for the weights."""

    async def onload(self) -> None:
        """Engines take all of their memory back and go on."""

    async def onload_weights(self) -> None:
        """Engines take the memory of their weights back."""

    async def onload_kv(self) -> None:
        """Engines take the rest of their memory back and go on."""


class EngineUser(Protocol):
    """Sends requests to the engines, and hears when they pause; a `RolloutExecutor` is one."""

    def updating(self) -> AbstractAsyncContextManager[None]:
        """Entered around an update of the weights: requests in flight do what `weights.on_update` says."""

    def engines_paused(self) -> None:
        """The engines generate nothing from now on: deadlines of requests stand still."""

    def engines_resumed(self) -> None:
        """The end of the pause."""

    def set_weight_version(self, version: str) -> None:
        """The engines hold `version` now."""


class RolloutPart(EngineUser, Protocol):
    """Makes the batches; a `RolloutExecutor` is one."""

    name: str
    """Empty for the only executor of a job."""

    @property
    def last_rollout(self) -> RolloutMetrics:
        """Figures of the batch that `get` returned last."""

    async def get(self, rollout_id: int, trainer: str) -> RolloutBatch:
        """The batch of step `rollout_id`, for the trainer of that name."""

    async def commit(self, rollout_id: int, trainer: str) -> None:
        """The trainer of that name has trained the batch."""

    def settle(self, step: int, trainer: str) -> None:
        """The job ends, and the trainer has trained the batches before that of `step`; a later one is taken back."""

    def generate_ahead(self, first: int, num_rollouts: int) -> None:
        """From now on the groups of the rollouts [first, num_rollouts) are generated without being asked for."""

    async def save(self) -> dict[str, bytes]:
        """Files for a checkpoint."""

    async def restore(
        self, files: Mapping[str, bytes], step: int, on_reached: Callable[[Reached], Awaitable[object]] | None = None
    ) -> Reached | None:
        """Goes on from what `save` returned when `step` batches were trained; returns how far that was.

        `on_reached` hears it before any group comes back.
        """

    async def eval(self, rollout_id: int, hf_dir: Path | None = None) -> EvalReport:
        """Evaluates the policy, or the model in `hf_dir`; whatever goes wrong is a skipped point with a reason."""

    def report_eval_skip(self, rollout_id: int, reason: str) -> EvalReport:
        """The point that an evaluation leaves which could not begin."""


class TrainingPart(Protocol):
    """Trains; a `TrainGroup` is one."""

    @property
    def resumed(self) -> SavedCheckpoint | None:
        """The checkpoint that `init` began from; None where it began from the model."""

    async def init(self, *, threads: int | None = None) -> int:
        """Builds the trainer on every rank; returns the first rollout id.

        `threads`: with how many threads each rank computes on CPU; None leaves it to torch.
        """

    async def train(self, rollout_id: int, batch: RolloutBatch) -> dict[str, float]:
        """Trains on one batch; returns metrics."""

    async def train_sft(self, rollout_id: int | None, batch: RolloutBatch, lr: float) -> dict[str, float]:
        """Trains on one batch with cross entropy; None is no step of the loop, but one of a warm-up."""

    async def reset_optimizer(self) -> None:
        """Forgets the optimizer's state."""

    async def update_weights(self, rollout_id: int | None = None) -> PublicationReport | None:
        """Publishes the present weights; None where there are no engines or no new weights."""

    async def settle(self) -> int:
        """Waits for the step that its caller gave up, if there is one; returns how many are trained then."""

    async def save_checkpoint(
        self, rollout_id: int, extra: Mapping[str, bytes] | None = None, *, wait: bool = False
    ) -> Path | None:
        """Saves the state after rollout `rollout_id`, and the files `extra` with it; None where it was not written."""

    async def finish_checkpoint(self) -> None:
        """Waits for the checkpoint that is being written."""

    async def export_hf(self, directory: Path) -> None:
        """Writes the policy as a Hugging Face directory."""

    async def offload(self, *, keep_weights: bool = False) -> None:
        """Frees the trainer's GPUs, except for the weights where they are still to be published."""

    async def onload(self) -> None:
        """Undoes `offload`."""

    def statistics(self) -> TrainGroupStatistics:
        """A snapshot."""


class RolloutComponents(NamedTuple):
    """The inference half of a job."""

    inference_controller: InferencePart
    rollout_executor: RolloutPart
    num_rollout_per_epoch: int | None
    """Set only when the run is given in epochs (`train.num_steps` is none)."""
