"""A rank writes its part of a checkpoint in a thread, beside the training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from asyncrl.training.checkpoints.manifest import Wrote
from asyncrl.training.checkpoints.shard import Snapshot, write_snapshots
from asyncrl.training.ranks.layout import RankLayout

Report = Callable[[Wrote], None]


def write_beside(
    snapshots: Mapping[str, Snapshot], directory: Path, number: int, layout: RankLayout, report: Report
) -> None:
    """Starts a daemon thread that writes the snapshots of all roles; it reports exactly once, also when it fails."""

    def write() -> None:
        try:
            wrote = Wrote(number, write_snapshots(snapshots, directory, layout))
        except Exception as error:  # of any kind: rank 0 waits for the report
            wrote = Wrote(number, {}, f"rank {layout.rank}: {type(error).__name__}: {error}")
        report(wrote)

    threading.Thread(target=write, name="checkpoint-writer", daemon=True).start()
