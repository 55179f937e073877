"""MegatronBackend: one rank's part of a model, computed and sharded by Megatron-core.

Never run so far (needs a GPU): bfloat16 with NCCL, Transformer Engine layers, `offload` and `onload` other than as
no-ops; the generators of a GPU in `snapshot` and `restore`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from asyncrl.config import Config
from asyncrl.config.architecture import check_tensor_parallel, read_architecture
from asyncrl.data.batch import RolloutBatch
from asyncrl.errors import ModelError
from asyncrl.training.checkpoints.saved_shards import SavedShards
from asyncrl.training.checkpoints.shard import Shard, Snapshot, capture_rng, restore_rng
from asyncrl.training.learner.backend import Backend
from asyncrl.training.learner.packing import MicroBatch
from asyncrl.training.learner.step_loss import StepLoss
from asyncrl.training.learner.tally import Tally
from asyncrl.training.megatron.checkpoint import Checkpoint, WeightExchange
from asyncrl.training.megatron.frozen import FrozenModel
from asyncrl.training.megatron.model import PolicyModel, transformer_config
from asyncrl.training.megatron.optimizer import Optimizer
from asyncrl.training.megatron.parallel import join
from asyncrl.training.megatron.shards import reader, shard_of
from asyncrl.training.megatron.step import forward_backward, forward_logprobs
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.training.roles import Role
from asyncrl.weights.buckets import TensorSpec

_MODEL = "model"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MegatronBackend:
    """Implements `asyncrl.training.learner.backend.Backend`, which says what each method promises."""

    def __init__(self, config: Config, layout: RankLayout, role: Role) -> None:
        """Reads no weights yet. Raises ConfigError or ModelError for a model that cannot be trained so."""
        self._config = config
        self._layout = layout
        self._source, self._trained = Path(role.model), role.trained
        self._architecture = read_architecture(self._source)
        check_tensor_parallel(self._architecture, layout.tensor_parallel)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, without padding."""
        return self._architecture.vocab_size

    def init(self) -> None:
        """Joins Megatron's groups, builds the model and loads its weights. Raises ModelError."""
        config, layout = self._config, self._layout
        self._device = join(config, layout)
        cuda = self._device.type == "cuda"
        dtype = _DTYPES[("bfloat16" if cuda else "float32") if config.model.dtype == "auto" else config.model.dtype]
        model_config = transformer_config(
            self._architecture,
            dtype=dtype,
            tensor_parallel=layout.tensor_parallel,
            recompute=config.train.recompute,
        )
        model = PolicyModel(self._architecture, model_config).to(device=self._device, dtype=dtype)
        self._parameters = dict(model.named_parameters())
        self._weights = WeightExchange(
            self._parameters,
            self._architecture,
            layout,
            parallel_state.get_tensor_model_parallel_group(),
        )
        checkpoint = Checkpoint(self._source)
        self._source_dtype = checkpoint.dtype()
        self._weights.load(checkpoint)
        self._model: Optimizer | FrozenModel = (
            Optimizer(model, model_config, config.train, data_parallel=layout.data_parallel)
            if self._trained
            else FrozenModel(model, model_config, layout)
        )

    def forward_backward(self, batch: RolloutBatch, micro_batches: Sequence[MicroBatch], loss: StepLoss) -> Tally:
        """Leaves the mean gradient over the trained tokens of all ranks in Megatron's buffers; returns their tally."""
        self._optimizer.zero_grad()
        return forward_backward(
            self._optimizer.module, batch, micro_batches, loss, vocab_size=self.vocab_size, device=self._device
        )

    def logprobs(self, batch: RolloutBatch, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Log-probs of sampled tokens: float32 [T] on the CPU, the same on every rank."""
        return forward_logprobs(
            self._model.module, batch, micro_batches, vocab_size=self.vocab_size, device=self._device
        )

    def grad_norm(self) -> float:
        """Global L2 norm of the gradient, the same on every rank."""
        return self._optimizer.grad_norm()

    def step(self, lr: float, grad_norm: float) -> None:
        """Clips the gradient and updates the weights."""
        self._optimizer.step(lr, grad_norm)

    def growth(self) -> float:
        """How far weights have grown since `init`, the same on every rank; infinite where one is not finite."""
        return self._optimizer.growth()

    def reset_optimizer(self) -> None:
        """Forgets Adam's moments and step count."""
        self._optimizer.reset()

    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        """The tensors that `export_tensors` yields, in its order."""
        return self._weights.specs()

    def export_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, whole tensor); see `WeightExchange.export`."""
        return self._weights.export()

    def export_hf(self, directory: Path) -> None:
        """Writes a Hugging Face directory on rank 0 in the dtype of the model that was loaded. Raises OSError there."""
        self._weights.export_directory(self._source, directory, dtype=self._source_dtype)

    def snapshot(self) -> Snapshot:
        """Copies weights, Adam's state and random number generators; on rank 0 the whole model too if it is trained."""
        held, facts = self._model.state()
        model = shard_of(held, {_MODEL: facts})
        rng = capture_rng(tensor_parallel.get_cuda_rng_tracker().get_states(), self._device)
        shard = Shard({**model.tensors, **rng.tensors}, {**model.facts, **rng.facts}, model.pieces)
        whole = self._weights.collect(self._source, dtype=self._source_dtype) if self._trained else None
        return Snapshot(shard, whole)

    def restore(self, saved: SavedShards) -> None:
        """Goes on from the snapshots of all ranks. Raises CheckpointError for those of another model or optimizer."""
        read = reader(saved, self._weights.part_shapes(), self._architecture, self._layout)
        self._model.restore(saved.facts[0][_MODEL], read)
        if saved.same_layout:  # in another one they stay as they are: dropout is off, so that nothing draws from them
            tensor_parallel.get_cuda_rng_tracker().set_states(restore_rng(saved.own(), self._device))

    def copy_weights(self, source: Backend) -> None:
        """Takes over the weights of another role. Raises ModelError where its architecture is another."""
        assert isinstance(source, MegatronBackend) and isinstance(self._model, FrozenModel)
        if source._architecture != self._architecture:
            raise ModelError(f"{source._source} and {self._source} are models of different architectures")
        self._model.copy(source._parameters)

    def offload(self, *, keep_weights: bool) -> None:
        """Moves Adam's state to host memory and drops gradients; the weights go too unless they are kept."""
        if self._device.type == "cuda":
            self._model.offload(keep_weights=keep_weights)

    def onload(self) -> None:
        """Undoes `offload`."""
        if self._device.type == "cuda":
            self._model.onload()

    @property
    def _optimizer(self) -> Optimizer:
        assert isinstance(self._model, Optimizer), "a frozen role is not trained"
        return self._model
