"""Waits for the GPU in transfers over NCCL.

Invariants
- No wait holds the GIL. A poll (`query`, `is_completed`) does, and CUDA may keep it from returning while another thread
  aborts a communicator.
- No stream waits for a send. The GPU of rank 0 has one queue (`CUDA_DEVICE_MAX_CONNECTIONS`): the wait for one engine
  would stand in it before the messages to the others.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


class SendStream:
    """The CUDA stream of one process group, on the device that is current where it is made.

    What is sent on it must be computed already: it waits for no other stream.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._sent = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def selected(self) -> AbstractContextManager[object]:
        """Makes it the current stream of the thread."""
        return torch.cuda.stream(self._stream)

    def settle(self) -> None:
        """Returns when all that was sent on it has ended."""
        self._sent.record(self._stream)
        self._sent.synchronize()


def wait_until_computed() -> None:
    """Returns when the GPU has done all that this thread asked of it."""
    torch.cuda.current_stream().synchronize()
