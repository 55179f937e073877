"""The process of one sink: follows metrics.jsonl until the job has ended.

    python -m asyncrl.observability.trackers.follow SINK RUN_DIR --attempt N [--router-url URL]

The file `end_mark` says that no line will follow: the sink gets those that are left, finishes, and the process exits.
(A file and not a signal, which would end a process that has only just started.)
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.observability.trackers.sink import TrackedRun, end_mark
from asyncrl.observability.trackers.sinks import open_sink

_LOOK_S = 0.25
"""Between two looks at the file."""
_HEAD = frozenset({"step", "attempt", "time", "nonfinite"})


def follow(path: Path, end: Path) -> Iterator[bytes]:
    """Yields the whole lines of a file, and those that are appended to it until file `end` is there."""
    with path.open("rb") as file:
        rest = b""
        while True:
            last = end.exists()  # lines that were written before it was are read below
            while data := file.readline():
                rest += data
                if rest.endswith(b"\n"):
                    yield rest
                    rest = b""
            if last:
                return
            time.sleep(_LOOK_S)


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in a line of metrics.jsonl; a value that is null there is NaN or infinite again."""
    nonfinite = line.get("nonfinite") or {}
    return {
        name: float(nonfinite.get(name, math.nan)) if value is None else value
        for name, value in line.items()
        if name not in _HEAD
    }


def main() -> None:
    """Runs until the job has ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("sink")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--router-url")
    told = parser.parse_args()
    run = TrackedRun.read(told.run_dir, attempt=told.attempt, router_url=told.router_url)
    sink = open_sink(told.sink, run, run.config["track"]["args"].get(told.sink, {}))
    for text in follow(told.run_dir / "metrics.jsonl", end_mark(told.run_dir, told.attempt)):
        try:
            line = json.loads(text)
        except ValueError:  # damaged by a full disk
            continue
        if line.get("attempt") == told.attempt:
            sink.log(line["step"], line["time"], metrics_of(line))
    sink.finish()


if __name__ == "__main__":
    main()
