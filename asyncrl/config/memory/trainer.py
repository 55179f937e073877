"""What one trainer rank needs on its device, and in host memory. Pure.

Invariants
- What lies on the device all the time is counted in full: weights of all roles, gradients in float32, and Adam's state
  (moments, and in bfloat16 training the weights in float32), of which each data-parallel rank holds a part.
- To that comes the largest of the phases that follow one another: a micro-batch, or a publication.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.config.architecture import Architecture
from asyncrl.config.layout import Device, DType
from asyncrl.config.memory.activations import TokenActivations, token_activations
from asyncrl.config.memory.needs import Parts, added, largest
from asyncrl.config.memory.shapes import BYTES, RankShape
from asyncrl.config.root import Config

RUNTIME_BYTES = 2 << 30
"""Assumed, of a trainer rank on a GPU: CUDA context, kernels, libraries and the communicators of NCCL."""
_GRADIENT = _MAIN_WEIGHT = 4
_MOMENTS = 8
_PINNED = 4, 3
"""Page-locked memory, each block rounded up to a power of two, to what was asked for (assumed, of many parameters)."""
_MIB = 1 << 20
_MOST_BUCKET_MIB = 512
"""Transfer buckets are at most so large where nobody says it (`weights/buckets.py`)."""


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """One rank of a trainer, in bytes."""

    weights: int
    """Of the trained model."""
    frozen: int
    """Weights of the models that are not trained: a reference, a teacher."""
    gradients: int
    optimizer: int
    """Adam's state, wherever it lies."""
    on_host: bool
    """Whether Adam's state lies in host memory."""
    host: int
    """Of Adam's state there, and page-locked copies of the gradients that it takes; 0 where it lies on the device."""
    host_at_start: int
    """Of float32 weights while it is built: Megatron copies all of the rank's, then those that the rank updates."""
    buffers: int
    """Of a publication: transfer buckets, and the parameter that is put together."""
    runtime: int
    per_token: TokenActivations

    @property
    def static(self) -> Parts:
        """What lies on the device at any time."""
        optimizer, weights = 0 if self.on_host else self.optimizer, self.weights + self.frozen
        return added({"weights": weights, "gradients": self.gradients, "optimizer": optimizer, "runtime": self.runtime})

    def at(self, tokens: int) -> Parts:
        """What lies on the device at the peak of a step with micro-batches of `tokens` tokens."""
        activations, logits = self.per_token.peak(tokens)
        phase = largest([{"activations": activations, "logits": logits}, {"buffers": self.buffers}])
        return added(self.static, phase)

    @property
    def handover(self) -> Parts:
        """What lies on a shared device while weights go over to its engines."""
        return added({"weights": self.weights, "buffers": self.buffers, "runtime": self.runtime})


def trainer_memory(
    config: Config,
    model: Architecture,
    *,
    dtype: DType,
    device: Device,
    data_parallel: int,
    frozen: Iterable[Architecture] = (),
) -> TrainerMemory:
    """The memory of one of the ranks that share `data_parallel` copies of the model, and of the `frozen` ones."""
    train, number = config.train, BYTES[dtype]
    shape, whole = RankShape(model, train.tensor_parallel), RankShape(model)
    state = _MOMENTS + (_MAIN_WEIGHT if dtype == "bfloat16" else 0)
    optimizer, updated = (-(-shape.parameters * size // data_parallel) for size in (state, _GRADIENT))
    bucket = max((config.weights.bucket_mib or _MOST_BUCKET_MIB) * _MIB, whole.vocabulary * model.hidden_size * number)
    gathered = 2 * whole.largest_parameter * number if train.tensor_parallel > 1 else 0
    return TrainerMemory(
        weights=shape.parameters * number,
        frozen=sum(RankShape(other, train.tensor_parallel).parameters for other in frozen) * number,
        gradients=shape.parameters * _GRADIENT,
        optimizer=optimizer,
        on_host=train.optimizer_on_host,
        host=(optimizer + updated * _PINNED[0] // _PINNED[1]) * train.optimizer_on_host,
        host_at_start=(shape.parameters * _MAIN_WEIGHT + updated) * train.optimizer_on_host,
        buffers=2 * bucket + gathered,
        runtime=RUNTIME_BYTES if device == "cuda" else 0,
        per_token=token_activations(shape, dtype=dtype, device=device, recompute=train.recompute),
    )
