"""How well generation and training overlap in the real demo, with a core for the engine and one for the rest.

    python benchmarks/demo_overlap.py [--steps 30] [--rounds 3]

Each round runs the demo with train.py (synchronous) and with train_async.py at a staleness of up to 1 and 3. The
synchronous run shows how long generation and training take alone: T_gen is its mean wait for a batch, T_train its mean
training time. The engine is bound to the last core. The system places the other processes: trainer and executor (one
process, one computing thread), the router and the rest. The first steps do not count, because pipelines fill and caches
warm up in them.

`over max` is the time of a step over max(T_gen, T_train) of the same round. The columns split a step into the wait for
a batch, training, and publishing the weights. Prints a table and writes benchmarks/results/demo_overlap.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "entrypoints" / "recipes" / "demo.toml"
RESULTS = ROOT / "benchmarks" / "results" / "demo_overlap.json"
SYNCHRONOUS = "synchronous"
RUNS = {SYNCHRONOUS: ("train.py", 0), "staleness <= 1": ("train_async.py", 1), "staleness <= 3": ("train_async.py", 3)}
SKIPPED = 5
"""Number of first steps that do not count."""
PARTS = ("step", "wait", "train", "publish")
AIM = 1.15


def run_demo(work: Path, name: str, steps: int) -> dict[str, float]:
    """Runs the demo; returns the mean seconds of each part of a step."""
    entry, staleness = RUNS[name]
    engine_cpu = max(os.sched_getaffinity(0))
    run = work / f"run-{len(list(work.iterdir()))}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = {
        "run.dir": run,
        "run.export": "false",
        "run.display": "plain",
        "model.path": work / "model",
        "train.num_steps": steps,
        "rollout.max_staleness": staleness,
        "engine.cpus": f"[{engine_cpu}]",
    }
    command = [*launcher, str(ROOT / "entrypoints" / entry), "@", str(RECIPE)]
    command += [text for key, value in options.items() for text in (f"--{key}", str(value))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if "time/step_s" in line][SKIPPED:]
    if len(timed) < steps - SKIPPED:
        sys.exit(f"{entry} ended after {len(timed) + SKIPPED} of {steps} steps; see {run}")
    return {part: statistics.fmean(seconds_of(line)[part] for line in timed) for part in PARTS}


def seconds_of(line: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of each part of a step, without evaluations.

    The synchronous loop generates nothing ahead, so there the wait for a batch is `generate`.
    """
    wait_s = line["time/wait_s"] if "time/wait_s" in line else line["time/generate_s"]
    step_s = line["time/step_s"] - line.get("time/eval_s", 0.0)
    return {"step": step_s, "wait": wait_s, "train": line["time/train_s"], "publish": line["time/publish_s"]}


def over_max(row: Mapping[str, float], alone: Mapping[str, float]) -> float:
    """Returns the time of a step over the larger of generation and training alone."""
    return row["step"] / max(alone["wait"], alone["train"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("engine and trainer need a core each; this process may use one")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        for number in range(arguments.rounds):
            for name in RUNS:
                rows.append({"round": number, "run": name, **run_demo(Path(directory), name, arguments.steps)})
                alone = next(row for row in rows if row["round"] == number and row["run"] == SYNCHRONOUS)
                rows[-1] |= {"over_max": over_max(rows[-1], alone), "ratio_to_sync": alone["step"] / rows[-1]["step"]}
                print(f"  {number + 1}/{arguments.rounds} {name:16}{figures(rows[-1])}", flush=True)
    print(f"\n{'median':16}{'step s':>8}{'wait':>8}{'train':>8}{'publish':>9}{'over max':>10}{'sync / it':>11}")
    for name in RUNS:
        mine = [row for row in rows if row["run"] == name]
        median = {key: statistics.median(row[key] for row in mine) for key in (*PARTS, "over_max", "ratio_to_sync")}
        print(f"{name:16}{figures(median)}")
    RESULTS.write_text(json.dumps({"steps": arguments.steps, "aim": AIM, "rows": rows}, indent=1) + "\n")


def figures(row: Mapping[str, float]) -> str:
    """Formats one row of the table."""
    parts = f"{row['step']:8.2f}{row['wait']:8.2f}{row['train']:8.2f}{row['publish']:9.2f}"
    return f"{parts}{row['over_max']:10.2f}{row['ratio_to_sync']:11.2f}"


if __name__ == "__main__":
    main()
