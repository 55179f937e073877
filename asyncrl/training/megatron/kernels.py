"""Which fused kernels a rank computes with: Transformer Engine's where it can be used, else torch's own.

Invariant: what is chosen here exists on the machine. A package that is installed and cannot be used is told once, and
the rank computes without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from enum import Enum
from functools import cache

import structlog
import torch

_log = structlog.get_logger(__name__)

_TRANSFORMER_ENGINE = "transformer_engine"
_INSTALL = "install the version that fits: pip install --no-build-isolation -c requirements.lock '.[gpu]'; or remove it"
_FLASH_CAPABILITY = (8, 0)
"""Compute capability from which torch's flash attention runs (Ampere)."""
_FLASH_HEAD_DIM = 192
"""Largest size of a head whose gradient torch's flash attention computes on every such GPU; all are multiples of 8."""
_CUDNN_CAPABILITIES = (9, 0), (12, 0)
"""First and end of the compute capabilities on which cuDNN takes packed sequences: Hopper, and Blackwell of data
centers. On others Transformer Engine keeps all scores of a sequence in memory, or wants flash-attn."""
_CUDNN_HEAD_DIM = 128
"""Largest size of a head whose gradient cuDNN computes on all of them."""


class Attention(Enum):
    """What computes the attention over packed sequences."""

    TRANSFORMER_ENGINE = "Transformer Engine, which asks cuDNN"
    VARIABLE_LENGTH = "torch's flash attention, by the ends of the sequences: no padding, no copies"
    PADDED = "torch's scaled_dot_product_attention over runs of sequences that are padded to equal length"


def choose_attention(
    *, transformer_engine: bool, capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int
) -> Attention:
    """Chooses for a device of compute `capability` (None: no GPU). Pure."""
    if capability is None or dtype not in (torch.bfloat16, torch.float16) or head_dim % 8:
        return Attention.PADDED
    first, end = _CUDNN_CAPABILITIES
    if transformer_engine and first <= capability < end and head_dim <= _CUDNN_HEAD_DIM:
        return Attention.TRANSFORMER_ENGINE
    if capability >= _FLASH_CAPABILITY and head_dim <= _FLASH_HEAD_DIM:
        return Attention.VARIABLE_LENGTH
    return Attention.PADDED


@cache
def attention_of(device: torch.device, dtype: torch.dtype, head_dim: int) -> Attention:
    """What computes the attention of a model on `device`."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return choose_attention(
        transformer_engine=uses_transformer_engine(), capability=capability, dtype=dtype, head_dim=head_dim
    )


def uses_transformer_engine() -> bool:
    """True where layers are built from Transformer Engine: there is a GPU, and Megatron could import the package."""
    if not torch.cuda.is_available():
        return False
    from megatron.core.extensions import transformer_engine

    return bool(transformer_engine.HAVE_TE)


def fuses_gradient_accumulation() -> bool:
    """True where a matrix product adds to the gradient in one kernel, of Apex, which Megatron has found."""
    if not torch.cuda.is_available():
        return False
    from megatron.core.tensor_parallel import layers

    return bool(layers._grad_accum_fusion_available)


def check_transformer_engine() -> None:
    """Tells if Transformer Engine is installed and does not load, and hides it then. Before Megatron is imported.

    Megatron takes an ImportError for an absent package and says nothing. A shared library that is missing raises
    OSError, on which the import of Megatron would fail.
    """
    if not torch.cuda.is_available() or importlib.util.find_spec(_TRANSFORMER_ENGINE) is None:
        return
    try:
        importlib.import_module(f"{_TRANSFORMER_ENGINE}.pytorch")
    except Exception as error:  # whatever its libraries raise
        sys.modules[_TRANSFORMER_ENGINE] = None  # type: ignore[assignment]
        _log.warning(
            "Transformer Engine is installed, but does not load: training goes on without it, slower",
            reason=f"{type(error).__name__}: {error}",
            fix=_INSTALL,
        )


def tell_unused_transformer_engine() -> None:
    """Tells if Transformer Engine loads, and Megatron cannot use it. After Megatron is imported."""
    if sys.modules.get(f"{_TRANSFORMER_ENGINE}.pytorch") is not None and not uses_transformer_engine():
        _log.warning(
            "Megatron cannot use the installed version of Transformer Engine: training goes on without it, slower",
            fix=_INSTALL,
        )
