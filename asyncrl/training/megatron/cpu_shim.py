"""Makes Megatron-core run without CUDA. Nothing else bends Megatron. On a GPU machine it only hides wandb.

Megatron-core 0.16 runs on gloo and CPU tensors except for a few literals: `device="cuda"`,
`torch.cuda.current_device()`, and comparisons of `tensor.type()` with "torch.cuda.FloatTensor". A TorchFunctionMode
answers them. The mode holds for the *thread* that enters it, so `install` must be called in the thread that trains.
Recomputation of activations saves and sets the state of a GPU's generator, whatever is drawn from it: there is none.

Importing Megatron decorates dozens of fused kernels with torch.compile, which loads inductor, and looks for packages of
GPU kernels. One of them (flash_mla) answers with an OSError instead of an ImportError. Without `quick_import` the
import costs six seconds more, or fails.

Megatron imports wandb for its own timers, where it is installed. An imported wandb has made two temporary directories,
which only a regular exit of the process removes; a rank that a signal stops leaves by `os._exit`. Trackers have
processes of their own, so no rank needs wandb.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_GPU_PACKAGES = ("flash_mla", "flashinfer", "transformer_engine")
"""Packages of kernels that Megatron uses where it can import them; the first two come with SGLang."""
_NEVER_NEEDED = ("wandb",)

_thread = threading.local()


def needed() -> bool:
    """True where there is no CUDA."""
    return not torch.cuda.is_available()


@contextlib.contextmanager
def quick_import() -> Iterator[None]:
    """While it is open, wandb seems absent. Without CUDA, GPU kernels do too, and torch.compile decorates nothing."""
    compile_ = torch.compile
    hidden: tuple[str, ...] = _NEVER_NEEDED
    if needed():
        hidden += _GPU_PACKAGES
        torch.compile = _compile_nothing
    loaded = {package: sys.modules[package] for package in hidden if package in sys.modules}
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        torch.compile = compile_
        for package in hidden:
            del sys.modules[package]
        sys.modules.update(loaded)


def install() -> None:
    """Answers CUDA literals with the CPU, in the calling thread, from now on. Idempotent in each thread."""
    if not needed() or getattr(_thread, "mode", None) is not None:
        return
    from megatron.core.tensor_parallel import random  # not before `quick_import`

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.random.get_rng_state = lambda device="cuda": torch.empty(0, dtype=torch.uint8)
    random._set_cuda_rng_state = _set_no_generator
    _thread.mode = _CudaMeansCpu()
    _thread.mode.__enter__()


class _CudaMeansCpu(TorchFunctionMode):
    """`device="cuda"` creates on the CPU; `.type()` names CUDA types, with which Megatron compares."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if kwargs:
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cuda":
                kwargs = {**kwargs, "device": "cpu"}
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args)
        if func is torch.Tensor.type and len(args) == 1:
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _set_no_generator(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    """Megatron's own would queue each call, for ever, until CUDA is there."""


def _compile_nothing(model: Any = None, **_: Any) -> Any:
    return model if model is not None else lambda function: function
