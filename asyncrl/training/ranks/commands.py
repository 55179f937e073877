"""The commands that rank 0 gives to all trainer ranks, and how a rank carries one out.

A command is data. `RankState.execute` says what it does, and is the same on every rank. Rank 0 alone passes a sink for
exported tensors and uses the returned value. Where an export names other ranks that offer tensors to engines, these
make a sink of their own.

Invariant: a failure in a role other than the actor names the role.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.errors import AsyncRLError
from asyncrl.training.checkpoints.restoring import restore
from asyncrl.training.checkpoints.shard import Snapshot
from asyncrl.training.checkpoints.writing import Report, write_beside
from asyncrl.training.learner.backend import Backend, BackendFactory
from asyncrl.training.learner.learner import Learner
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.training.roles import ACTOR, Role
from asyncrl.weights.buckets import TensorSpec
from asyncrl.weights.handover import Desk
from asyncrl.weights.handover import Handover as Handover  # msgspec reads the types of commands here
from asyncrl.weights.transfer import BucketFiller, Sink
from asyncrl.weights.transports.tensor_sink import TensorSink


class Build(msgspec.Struct, frozen=True, tag=True):
    """Build a role's part of this rank; answers with the role's tensor specs. Each role is built once."""

    role: Role
    run_dir: str
    """The directory that rank 0 took, which need not be the one that was asked for."""
    resume: str | None
    """The checkpoint to begin from; None begins from the role's model."""
    threads: int | None
    """With how many threads the rank computes on CPU; None leaves it to torch."""


class Train(msgspec.Struct, frozen=True, tag=True):
    """Train on the batch that follows."""

    role: str


class TrainSft(msgspec.Struct, frozen=True, tag=True):
    """One supervised step on the batch that follows."""

    role: str
    lr: float


class ResetOptimizer(msgspec.Struct, frozen=True, tag=True):
    """Forget the optimizer's state."""

    role: str


class Logprobs(msgspec.Struct, frozen=True, tag=True):
    """Log-probs of the sampled tokens of the batch that follows."""

    role: str


class CopyWeights(msgspec.Struct, frozen=True, tag=True):
    """Set the role's weights, of a model that is not trained, to those of another role of the same architecture."""

    role: str
    source: str


class ExportTensors(msgspec.Struct, frozen=True, tag=True):
    """Walk through the export once, to its end."""

    role: str
    handover: Handover | None = None
    """Which ranks offer their tensors to engines on the way; None: none but rank 0 takes any."""


class ExportHf(msgspec.Struct, frozen=True, tag=True):
    """Write a Hugging Face directory."""

    role: str
    directory: str


class Offload(msgspec.Struct, frozen=True, tag=True):
    """Move the role's tensors out of GPU memory."""

    role: str
    keep_weights: bool


class Onload(msgspec.Struct, frozen=True, tag=True):
    """Bring them back."""

    role: str


class SaveCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Copy the state of every role and begin to write it into a staged checkpoint."""

    number: int
    directory: str


class ClearMemory(msgspec.Struct, frozen=True, tag=True):
    """Give cached memory back."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave the command loop."""


RoleCommand = Train | TrainSft | ResetOptimizer | Logprobs | ExportTensors | ExportHf | Offload | Onload
"""Commands to one role that was built before."""

Command = Build | RoleCommand | CopyWeights | SaveCheckpoint | ClearMemory | Shutdown


@dataclass(frozen=True, slots=True)
class ExportOutcome:
    """How an export ended on this rank. What takes the tensors may fail; that is no failure of the rank."""

    error: Exception | None = None
    """Of the sink, or of the disk."""


Result = dict[str, float] | Tensor | tuple[TensorSpec, ...] | ExportOutcome | None


class RankState:
    """One rank's learners, by role.

    Args:
        report: called in another thread with what became of the rank's part of a checkpoint.
        desk: where a rank >= 1 offers tensors to engines.
    """

    def __init__(
        self,
        config: Config,
        layout: RankLayout,
        make_backend: BackendFactory,
        report: Report,
        desk: Desk | None = None,
    ) -> None:
        self.layout = layout
        self._report = report
        self._desk = desk
        self._config = config
        self._make_backend = make_backend
        self._learners: dict[str, Learner] = {}

    def execute(self, command: Command, batch: RolloutBatch | None = None, sink: Sink | None = None) -> Result:
        """Carries out one command; raises whatever a learner or its backend raises."""
        match command:
            case Build(role=role):
                with _naming(role.name):
                    return self._build(command)
            case SaveCheckpoint(number=number, directory=directory):
                write_beside(self._snapshots(), Path(directory), number, self.layout, self._report)
            case ClearMemory():
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            case Shutdown():
                self._learners.clear()
            case CopyWeights(role=role, source=source):
                with _naming(role):
                    self._learners[role].backend.copy_weights(self._learners[source].backend)
            case _:
                with _naming(command.role):
                    learner = self._learners[command.role]
                    return _command_role(learner, command, batch, sink or self._own_sink(learner, command))
        return None

    def _own_sink(self, learner: Learner, command: RoleCommand) -> Sink | None:
        """The sink of a rank >= 1 that offers its tensors to engines."""
        handover = command.handover if isinstance(command, ExportTensors) else None
        if handover is None or self._desk is None or self.layout.rank not in handover.ranks:
            return None
        filler = BucketFiller(learner.backend.tensor_specs(), handover.bucket_bytes)
        return TensorSink(filler, handover, self.layout.rank, self._desk)

    def _build(self, command: Build) -> tuple[TensorSpec, ...]:
        if command.threads is not None:
            torch.set_num_threads(command.threads)
        run = self._config.run.model_copy(update={"dir": Path(command.run_dir)})
        config = self._config.model_copy(update={"run": run})
        backend = self._make_backend(config, self.layout, command.role)
        backend.init()
        if command.resume is not None:
            restore(backend, Path(command.resume), self.layout, command.role.name)
        self._learners[command.role.name] = Learner(config, self.layout, backend)
        return backend.tensor_specs()

    def _snapshots(self) -> dict[str, Snapshot]:
        snapshots = {}
        for role, learner in self._learners.items():
            with _naming(role):
                snapshots[role] = learner.backend.snapshot()
        return snapshots


def _command_role(learner: Learner, command: RoleCommand, batch: RolloutBatch | None, sink: Sink | None) -> Result:
    backend = learner.backend
    match command:
        case Train():
            assert batch is not None
            return learner.train(batch)
        case TrainSft(lr=lr):
            assert batch is not None
            return learner.train_sft(batch, lr)
        case Logprobs():
            assert batch is not None
            return learner.logprobs(batch)
        case ResetOptimizer():
            backend.reset_optimizer()
        case ExportTensors():
            return _export(backend, sink)
        case ExportHf(directory=directory):
            try:
                backend.export_hf(Path(directory))
            except OSError as error:
                return ExportOutcome(error)
            return ExportOutcome()
        case Offload(keep_weights=keep_weights):
            backend.offload(keep_weights=keep_weights)
        case Onload():
            backend.onload()
    return None


@contextmanager
def _naming(role: str) -> Iterator[None]:
    """Puts the role's name into what fails inside. The actor goes without: a trainer that names no role means it."""
    try:
        yield
    except AsyncRLError as error:
        if role == ACTOR:
            raise
        raise type(error)(f"{role}: {error}").with_traceback(error.__traceback__) from error
    except Exception as error:  # a defect: it keeps its class and its traceback
        if role != ACTOR:
            error.add_note(f"in the role {role}")
        raise


def _export(backend: Backend, sink: Sink | None) -> ExportOutcome:
    """Walks the whole export even when the sink fails: the other ranks are in the same collectives."""
    error: Exception | None = None
    for name, tensor in backend.export_tensors():
        if sink is not None and error is None:
            try:
                sink.put(name, tensor)
            except Exception as failure:  # of any kind: it is reported, after the drain
                error = failure
    if sink is not None and error is None:
        try:
            sink.finish()
        except Exception as failure:
            error = failure
    return ExportOutcome(error)
