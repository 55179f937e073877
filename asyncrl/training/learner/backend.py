"""Backend: how a model is computed and sharded on the trainer's ranks, as the learner sees it.

The learner decides what is trained, in which steps, at which learning rate, and when to stop. A backend knows the
model, its gradients, its optimizer and its devices, and nothing of rewards or algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.training.checkpoints.saved_shards import SavedShards
from asyncrl.training.checkpoints.shard import Snapshot
from asyncrl.training.learner.packing import MicroBatch
from asyncrl.training.learner.step_loss import StepLoss
from asyncrl.training.learner.tally import Tally
from asyncrl.training.ranks.layout import RankLayout
from asyncrl.training.roles import Role
from asyncrl.weights.buckets import TensorSpec


class Backend(Protocol):
    """One rank's part of one role's model. A role that is not trained takes no call about gradients or optimizer.

    Every method is synchronous, and one thread of the rank makes all calls. Every method except `vocab_size` and
    `tensor_specs` is collective: all ranks call it in the same order, with the same arguments unless it says otherwise.
    A method that raises on one rank may leave the others in a collective, so the trainer ends after any error.

    The learner calls `init` first, then `restore` where it goes on from a checkpoint. An optimizer step is
    `forward_backward`, `grad_norm`, and `step` unless a figure is not finite; after the steps of a batch `growth`.
    """

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size). Known before `init`."""

    def init(self) -> None:
        """Builds the model and loads its weights; torch.distributed is initialised already.

        Process groups of the backend's own are made once for each rank, whatever the number of roles.

        Raises:
            ModelError: weights are missing, unreadable, or do not fit the model's config.
        """

    def forward_backward(self, batch: RolloutBatch, micro_batches: Sequence[MicroBatch], loss: StepLoss) -> Tally:
        """Computes the gradient of one optimizer step, in place of an earlier one.

        For each micro-batch the backend computes the log-probs and entropies of the sampled tokens, with logits divided
        by `loss.temperature`, and calls `loss` with them. Both carry gradient; entropies only where
        `loss.entropy_gradient` asks for it.

        Args:
            batch: the same on every rank.
            micro_batches: those of this rank's copy of the model, at least one; its tensor-parallel ranks get the same.
            loss: returns a sum over tokens, their number and figures.

        Returns:
            The tally over all micro-batches of all ranks, the same on every rank. The gradient of the loss, divided by
            the `tokens` of that tally, stays in the backend, reduced over the data-parallel ranks.

        Raises:
            AlgorithmError: the algorithm failed.
        """

    def logprobs(self, batch: RolloutBatch, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Log-probs at the batch's temperature, without gradient.

        Args:
            micro_batches: as for `forward_backward`, but none is allowed.

        Returns:
            float32 [T] on the CPU, the same on every rank; 0 for context and for tokens in no rank's micro-batches.
        """

    def grad_norm(self) -> float:
        """Global L2 norm of the gradient that `forward_backward` left.

        It is the same on every rank, so it is finite on all of them or on none.
        """

    def step(self, lr: float, grad_norm: float) -> None:
        """Clips the gradient to `train.grad_clip` and updates the weights.

        Args:
            lr: learning rate.
            grad_norm: what `grad_norm` returned, which must be finite.
        """

    def growth(self) -> float:
        """How far weights have grown: for each tensor its largest magnitude, relative to 1 or to its largest magnitude
        after `init` if that is more; the maximum over all tensors and ranks. Infinite where a weight is not finite.
        """

    def reset_optimizer(self) -> None:
        """Forgets the optimizer's moments and step count; the weights stay."""

    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        """Name, dtype (that of training) and shape of the tensors that `export_tensors` yields, in its order."""

    def export_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, whole tensor) on every rank, gathered one after the other.

        A tensor may be the live weight: it holds until the next `step`, `restore` or `offload`. Every rank must run the
        iterator to its end.
        """

    def export_hf(self, directory: Path) -> None:
        """Writes a Hugging Face directory on rank 0, whole or not at all, in the dtype of the model that was loaded.

        Raises:
            OSError: on rank 0 alone, after every rank has finished the export.
        """

    def snapshot(self) -> Snapshot:
        """Copies into host memory what `restore` needs: weights, optimizer state, random number generators.

        Each rank gets its own part. Rank 0 also gets the whole model for export, where the role is trained. Not while
        offloaded.
        """

    def restore(self, saved: SavedShards) -> None:
        """Goes on from what `snapshot` gave on each rank, whatever their layout was.

        In the same layout each rank goes on bit for bit. In another one its generators stay as they are.

        Raises:
            CheckpointError: the shards are those of another model or optimizer, or cannot be read.
        """

    def copy_weights(self, source: Backend) -> None:
        """Takes over the weights of `source`: the same kind of backend and architecture, on the same ranks. Only where
        the role is not trained.

        Raises:
            ModelError: the architectures differ.
        """

    def offload(self, *, keep_weights: bool) -> None:
        """Frees the GPU memory of this rank: optimizer state goes to host memory, gradients are dropped.

        Does nothing without a GPU.

        Args:
            keep_weights: leave the weights where they are, for an export; without it nothing can be computed or
                exported before `onload`.
        """

    def onload(self) -> None:
        """Undoes `offload`; gradients are empty afterwards."""


BackendFactory = Callable[[Config, RankLayout, Role], Backend]
"""Makes one rank's part of a role, without reading weights.

Raises ModelError or ConfigError for a model that the backend cannot train.
"""
