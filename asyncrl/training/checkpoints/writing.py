"""A rank writes its part of a checkpoint beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from asyncrl.training.checkpoints.manifest import Wrote
from asyncrl.training.checkpoints.shard import Snapshot, write_snapshot
from asyncrl.training.ranks.layout import RankLayout

Report = Callable[[Wrote], None]


def write_beside(snapshot: Snapshot, directory: Path, number: int, layout: RankLayout, report: Report) -> None:
    """Starts a daemon thread that writes, and reports once, whatever happens."""

    def write() -> None:
        try:
            wrote = Wrote(number, write_snapshot(snapshot, directory, layout))
        except Exception as error:  # of any kind: rank 0 waits for the report
            wrote = Wrote(number, {}, f"rank {layout.rank}: {type(error).__name__}: {error}")
        report(wrote)

    threading.Thread(target=write, name="checkpoint-writer", daemon=True).start()
