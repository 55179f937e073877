"""How long an engine may take for each step of a weight update: what a healthy one takes, with a margin.

Invariants
- While a step runs, every engine of the update stands still. One that hangs shows in a single step and is out from then
  on, so it holds the others up for the bound of that step: never longer than `begin_s` or `commit_s`, and the moment
  that the kernel takes to end it. (The transfer between them is bounded bucket by bucket, `weights.timeout_s`.)
- What walks all weights is bounded by their size, everything else by a constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAUSE_S = 30.0
"""The engine ends the forward pass under way first: 12 ms measured, and a long prefill on few cores takes seconds."""
STEP_S = 10.0
"""Stamp, open, continue, abort: of an engine that computes nothing meanwhile; 4 to 30 ms measured."""
WALK_S_PER_GB = 10.0
"""Reset, checksum, end of a session: about 1 s per GB on one core measured, and engines may share it."""
TAKE_BACK_S = 3.0
"""For an engine that is to give up an update, beside what its weights take; one that takes longer is killed."""
MOVE_S = 60.0
"""Release or return of memory, beside what weights take that go to host memory; never measured on a GPU."""
SETTLE_S = 180.0
"""Beside the steps of a commit: two tries to register an engine with a router that stands still, and engines that are
killed. Nobody stands still for it any more."""
LOAD_S = 300.0
LOAD_S_PER_GB = 20.0
"""Of a slow network disk. Nobody stands still for it."""
UNKNOWN_BYTES = 16 << 30
"""Where the model's directory holds no weights (an engine that makes them up)."""

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """In seconds, for engines that serve weights of `size_bytes`, an equal share in each of their `ranks`."""

    size_bytes: int = 0
    ranks: int = 1

    @classmethod
    def of_model(cls, directory: Path, ranks: int = 1) -> Deadlines:
        """By the files of a model. Blocks for as long as the directory takes to be read."""
        files = [file for pattern in _WEIGHT_FILES for file in directory.glob(pattern) if file.is_file()]
        return cls(sum(file.stat().st_size for file in files) if files else UNKNOWN_BYTES, ranks)

    @property
    def pause_s(self) -> float:
        return PAUSE_S

    @property
    def step_s(self) -> float:
        return STEP_S

    @property
    def walk_s(self) -> float:
        """For a step that reads or writes all weights in place."""
        return STEP_S + self._share_s

    @property
    def take_back_s(self) -> float:
        """For all that makes an engine go on after an update that failed."""
        return TAKE_BACK_S + self._share_s

    @property
    def move_s(self) -> float:
        """For memory that is released or taken back."""
        return MOVE_S + self._share_s

    @property
    def load_s(self) -> float:
        """For a load from disk, and for what else walks all weights of an engine that nobody waits for."""
        return LOAD_S + LOAD_S_PER_GB * self.size_bytes / 1e9

    def begin_s(self, *, baseline: bool) -> float:
        """From the first pause to the lease; `baseline`: random numbers are put and summed first."""
        return self.pause_s + 2 * self.step_s + (2 * self.walk_s if baseline else 0.0)

    def commit_s(self, *, verify: bool) -> float:
        """From the end of the transfer to the last engine that goes on."""
        return self.walk_s + (self.walk_s if verify else 0.0) + 2 * self.step_s

    def settle_s(self, *, verify: bool) -> float:
        """From the end of the transfer until the fleet has the engines back, whatever becomes of the update."""
        return self.commit_s(verify=verify) + self.take_back_s + SETTLE_S

    @property
    def _share_s(self) -> float:
        return WALK_S_PER_GB * self.size_bytes / self.ranks / 1e9
