"""The commands that rank 0 gives to all trainer ranks, and how a rank carries one out.

A command is data; what it does stands in `execute`, the same function on every rank. Rank 0 alone passes a
sink for exported tensors and uses the returned value.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.training.checkpoints.restoring import restore
from asyncrl.training.checkpoints.writing import Report, write_beside
from asyncrl.training.learner.backend import Backend, BackendFactory
from asyncrl.training.learner.learner import Learner
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.weights.buckets import TensorSpec
from asyncrl.weights.transfer import Sink


class Init(msgspec.Struct, frozen=True, tag=True):
    """Build the trainer; answers with its tensor specs."""

    run_dir: str
    """The directory that rank 0 took, which need not be the one that was asked for."""

    resume: str | None
    """The checkpoint to begin from; None begins from the model."""


class Train(msgspec.Struct, frozen=True, tag=True):
    """Train on the batch that follows."""


class TrainSft(msgspec.Struct, frozen=True, tag=True):
    """One supervised step on the batch that follows."""

    lr: float


class ResetOptimizer(msgspec.Struct, frozen=True, tag=True):
    """Forget the optimizer's state."""


class Logprobs(msgspec.Struct, frozen=True, tag=True):
    """Log-probs of the response tokens of the batch that follows."""


class ExportTensors(msgspec.Struct, frozen=True, tag=True):
    """Walk through the export once, to its end."""


class ExportHf(msgspec.Struct, frozen=True, tag=True):
    """Write a Hugging Face directory."""

    directory: str


class SaveCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Copy the rank's state and begin to write it into a staged checkpoint."""

    number: int
    directory: str


class Offload(msgspec.Struct, frozen=True, tag=True):
    """Move the trainer's tensors out of GPU memory."""

    keep_weights: bool


class Onload(msgspec.Struct, frozen=True, tag=True):
    """Bring them back."""


class ClearMemory(msgspec.Struct, frozen=True, tag=True):
    """Give cached memory back."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave the command loop."""


Command = (
    Init
    | Train
    | TrainSft
    | ResetOptimizer
    | Logprobs
    | ExportTensors
    | ExportHf
    | SaveCheckpoint
    | Offload
    | Onload
    | ClearMemory
    | Shutdown
)


@dataclass(frozen=True, slots=True)
class ExportOutcome:
    """How an export ended on this rank. A sink that failed is no failure of the rank."""

    sink_error: Exception | None = None


Result = dict[str, float] | Tensor | tuple[TensorSpec, ...] | ExportOutcome | None


class RankState:
    """One rank's learner, from the Init command on.

    Args:
        report: called in another thread with what became of the rank's part of a checkpoint.
    """

    def __init__(self, config: Config, layout: RankLayout, make_backend: BackendFactory, report: Report) -> None:
        self.layout = layout
        self._report = report
        self._config = config
        self._make_backend = make_backend
        self._learner: Learner | None = None

    def execute(self, command: Command, batch: RolloutBatch | None = None, sink: Sink | None = None) -> Result:
        """Carries out one command; raises whatever the learner or its backend raises."""
        if isinstance(command, Init):
            run = self._config.run.model_copy(update={"dir": Path(command.run_dir)})
            config = self._config.model_copy(update={"run": run})
            backend = self._make_backend(config, self.layout)
            self._learner = Learner(config, self.layout, backend)
            backend.init()
            if command.resume is not None:
                restore(backend, Path(command.resume), self.layout)
            return backend.tensor_specs()
        assert self._learner is not None, "the first command is Init"
        learner, backend = self._learner, self._learner.backend
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
                backend.export_hf(Path(directory))
            case SaveCheckpoint(number=number, directory=directory):
                write_beside(backend.snapshot(), Path(directory), number, self.layout, self._report)
            case Offload(keep_weights=keep_weights):
                backend.offload(keep_weights=keep_weights)
            case Onload():
                backend.onload()
            case ClearMemory():
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            case Shutdown():
                self._learner = None
        return None


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
