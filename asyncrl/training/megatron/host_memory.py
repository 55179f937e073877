"""Host memory in which tensors of one rank wait while engines have its GPU.

Invariants
- It lies in page-locked blocks, which GPUs copy to and from at the speed of the bus without stopping the program. The
  blocks are made once; more are made only when more tensors go than ever before. (torch rounds page-locked memory up
  to a power of two, so that one block for each tensor could take twice as much.)
- Whole storages go and come: a tensor, and every view of it, is the same object before and after, and has no memory in
  between. A storage that has none, or lies on another device, stays as it is: so each call may be repeated, and state
  that lives on the host anyway does not move.
- Copies are ordered by the current stream; nothing waits for them before `synchronize` (`free_cached`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from megatron.core import parallel_state
from torch import Tensor

from asyncrl.errors import TrainerError
from asyncrl.observability.text_plots import size

_BLOCK_BYTES = 64 << 20
_ALIGNMENT = 64


class HostMemory:
    """See the module's docstring. `device`: where the tensors compute."""

    def __init__(self, device: torch.device, block_bytes: int = _BLOCK_BYTES) -> None:
        self._device = device
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []
        self._away: list[tuple[torch.UntypedStorage, int, int]] = []
        """Storages without memory, with the size of each and where its bytes begin."""
        self._end = 0

    @property
    def size_bytes(self) -> int:
        """Page-locked memory that is taken."""
        return len(self._blocks) * self._block_bytes

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Moves the storages of `tensors` here, and frees their memory on the device."""
        for storage in {_identity(tensor): tensor.untyped_storage() for tensor in tensors}.values():
            length = storage.nbytes()
            if length == 0 or storage.device != self._device:
                continue
            start = self._end
            self._end += -(-length // _ALIGNMENT) * _ALIGNMENT
            for here, there in self._pieces(start, _bytes_of(storage)):
                here.copy_(there, non_blocking=True)
            self._away.append((storage, length, start))
            storage.resize_(0)

    def give_back(self) -> None:
        """Moves everything back to the device."""
        while self._away:
            storage, length, start = self._away[-1]
            storage.resize_(length)
            for here, there in self._pieces(start, _bytes_of(storage)):
                there.copy_(here, non_blocking=True)
            self._away.pop()
        self._end = 0

    def _pieces(self, start: int, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The bytes from `start` on, block by block, each beside its part of `data`."""
        while len(data):
            block, offset = divmod(start, self._block_bytes)
            if block == len(self._blocks):
                self._blocks.append(self._new_block())
            here = self._blocks[block][offset : offset + len(data)]
            yield here, data[: len(here)]
            start, data = start + len(here), data[len(here) :]

    def _new_block(self) -> Tensor:
        try:
            return torch.empty(self._block_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        except RuntimeError as error:
            raise TrainerError(
                f"no page-locked host memory for what leaves the GPU ({size(self.size_bytes)} are taken): {error}; "
                "give the machine more memory or a higher limit of locked memory (ulimit -l), or engines their own GPUs"
            ) from error


def free_cached() -> None:
    """Waits for the copies of the current device, and gives memory that torch and Megatron keep for later back to it.

    Memory that engines have read in place is free only after `ipc_collect`. Megatron keeps what tensor-parallel ranks
    gather of the tokens in one buffer, which it makes anew when it needs it.
    """
    parallel_state.get_global_memory_buffer().buffer.clear()
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    torch.cuda.empty_cache()


def apart_from(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """Those of `tensors` that share no storage with any of `others`."""
    theirs = {_identity(tensor) for tensor in others}
    return [tensor for tensor in tensors if _identity(tensor) not in theirs]


def _identity(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """uint8 [n]: all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
