"""How long an engine may take for each step of a weight update: the time of a healthy engine, with a margin.

Invariants
- While a step runs, every engine of the update stands still. An engine that hangs fails a single step and takes part in
  no further one. So it holds the others up for the bound of that step, never longer than `begin_s` or `commit_s`, and
  for the moment that the kernel takes to end it. (The transfer between begin and commit is bounded bucket by bucket,
  `weights.timeout_s`.)
- A step that walks all weights is bounded by their size, every other step by a constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAUSE_S = 30.0
"""For a pause. The engine ends its forward pass first: 12 ms measured; a long prefill on few cores takes seconds."""
STEP_S = 10.0
"""For stamp, open, continue, abort, while the engine computes nothing; 4 to 30 ms measured."""
WALK_S_PER_GB = 10.0
"""For reset, checksum, end of a session: about 1 s per GB on one core measured, and engines may share a core."""
TAKE_BACK_S = 3.0
"""For an engine to give up an update, beside the time for its weights; one that takes longer is killed."""
MOVE_S = 60.0
"""For release or return of memory, beside the time for weights that go to host memory; never measured on a GPU."""
SETTLE_S = 180.0
"""Beside the steps of a commit: two tries to register an engine with a router that hangs, and engines that are killed.
The engines generate meanwhile."""
LOAD_S = 300.0
LOAD_S_PER_GB = 20.0
"""From a slow network disk. The other engines generate meanwhile."""
UNKNOWN_BYTES = 16 << 30
"""Assumed where the model's directory holds no weights (the engine makes them up)."""

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Deadlines in seconds for engines that hold weights of `size_bytes`, an equal share in each of their `ranks`."""

    size_bytes: int = 0
    ranks: int = 1

    @classmethod
    def of_model(cls, directory: Path, ranks: int = 1) -> Deadlines:
        """Deadlines for the model in `directory`, by the size of its files. Blocks while the directory is read."""
        files = [file for pattern in _WEIGHT_FILES for file in directory.glob(pattern) if file.is_file()]
        return cls(sum(file.stat().st_size for file in files) if files else UNKNOWN_BYTES, ranks)

    @property
    def pause_s(self) -> float:
        """For a pause of generation."""
        return PAUSE_S

    @property
    def step_s(self) -> float:
        """For a step that walks no weights."""
        return STEP_S

    @property
    def walk_s(self) -> float:
        """For a step that reads or writes all weights in place."""
        return STEP_S + self._share_s

    @property
    def take_back_s(self) -> float:
        """For all steps that let an engine go on after an update that failed."""
        return TAKE_BACK_S + self._share_s

    @property
    def move_s(self) -> float:
        """For memory that is released or taken back."""
        return MOVE_S + self._share_s

    @property
    def load_s(self) -> float:
        """For a load from disk, and for other walks over all weights of an engine that holds up no other."""
        return LOAD_S + LOAD_S_PER_GB * self.size_bytes / 1e9

    def begin_s(self, *, baseline: bool) -> float:
        """From the first pause to the lease; with `baseline`, random numbers are written and summed first."""
        return self.pause_s + 2 * self.step_s + (2 * self.walk_s if baseline else 0.0)

    def commit_s(self, *, verify: bool) -> float:
        """From the end of the transfer to the last engine that goes on."""
        return self.walk_s + (self.walk_s if verify else 0.0) + 2 * self.step_s

    def settle_s(self, *, verify: bool) -> float:
        """From the end of the transfer until the fleet has the engines back, however the update ends."""
        return self.commit_s(verify=verify) + self.take_back_s + SETTLE_S

    @property
    def _share_s(self) -> float:
        return WALK_S_PER_GB * self.size_bytes / self.ranks / 1e9
