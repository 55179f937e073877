"""What torch keeps and allocates on the CPU while a model is trained, counted by storage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Allocations(TorchDispatchMode):
    """While it is open: storages that autograd saves, and storages that live.

    Storages that were there before, parameters among them, do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._before = {id_of(t) for t in gc.get_objects() if issubclass(type(t), Tensor)}
        self._saved: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._live_bytes = 0
        self._hooks = ExitStack()

    @property
    def saved_bytes(self) -> int:
        """Of all that autograd saved so far; meant to be read between forward and backward pass."""
        return sum(self._saved.values())

    def __enter__(self) -> Self:
        self._hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor))
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return result

    def _save(self, tensor: Tensor) -> Tensor:
        if id_of(tensor) not in self._before:
            self._saved[id_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def _see(self, tensor: Tensor) -> None:
        key, storage = id_of(tensor), tensor.untyped_storage()
        if key in self._before or key in self._live:
            return
        self._live[key] = storage.nbytes()
        self._live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._live_bytes -= self._live.pop(key, 0)


def id_of(tensor: Tensor) -> int:
    """The same for all tensors of one storage, while it lives."""
    return tensor.untyped_storage()._cdata


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Size of the storages of `tensors`, each once."""
    return sum({id_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
