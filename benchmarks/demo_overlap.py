"""What a step costs in the real demo: the synchronous loop, the asynchronous one, and their two halves alone.

    python benchmarks/demo_overlap.py [--steps 30] [--rounds 3] [--before CHECKOUT]

Two tasks: the demo as it is, and short answers (128 samples of 10 tokens a step). Each round runs them with the
README's own commands, without any environment: train.py (synchronous), and train_async.py at a staleness of up to 1
and 3. One more run of train.py has the engine bound to one core and the trainer to one thread: it shows how long
generation (T_gen, the mean wait for a batch) and training (T_train) take alone on one core each. With `--before`,
train.py and train_async.py (staleness 1) of another checkout run beside those of this one, in turn.

`over max` is the time of a step over max(T_gen, T_train) of the same round. The columns split a step into the wait for
a batch, training, and publishing the weights. The first steps do not count: pipelines fill and caches warm up in
them. Prints a table and writes benchmarks/results/demo_overlap.json.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "demo_overlap.json"
SKIPPED = 5
"""Number of first steps that do not count."""
PARTS = ("step", "wait", "train", "publish")
AIM = 1.15

TASKS: dict[str, dict[str, Any]] = {
    "demo": {},
    "short": {
        "rollout.prompts_per_step": 8,
        "rollout.max_new_tokens": 10,
        "rollout.ignore_eos": "true",
        "warmup.steps": 5,
    },
}


@dataclass(frozen=True)
class Kind:
    """One way to run the demo."""

    name: str
    entry: str
    staleness: int | None = None
    a_core_each: bool = False
    checkout: Path = ROOT

    def seconds(self, work: Path, task: str, steps: int) -> dict[str, float]:
        """Runs the demo; returns the mean seconds of each part of a step."""
        run = work / f"run-{len(list(work.iterdir()))}"
        options = TASKS[task] | {
            "run.dir": run,
            "run.export": "false",
            "run.display": "plain",
            "model.path": work / "model",
            "train.num_steps": steps,
        }
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment["PYTHONPATH"] = str(self.checkout)
        if self.staleness is not None:
            options["rollout.max_staleness"] = self.staleness
        if self.a_core_each:
            options["engine.cpus"] = f"[{max(os.sched_getaffinity(0))}]"
            environment["OMP_NUM_THREADS"] = "1"
        recipe = self.checkout / "entrypoints" / "recipes" / "demo.toml"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        command = [*launcher, str(self.checkout / "entrypoints" / self.entry), "@", str(recipe)]
        command += [text for key, value in options.items() for text in (f"--{key}", str(value))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, cwd=work)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        timed = [line for line in lines if "time/step_s" in line][SKIPPED:]
        if len(timed) < steps - SKIPPED:
            sys.exit(f"{self.entry} ended after {len(timed) + SKIPPED} of {steps} steps; see {run}")
        return {part: statistics.fmean(seconds_of(line)[part] for line in timed) for part in PARTS}


ALONE = Kind("alone, a core each", "train.py", a_core_each=True)
SYNCHRONOUS = Kind("synchronous", "train.py")
ASYNCHRONOUS = Kind("staleness <= 1", "train_async.py", 1)
FURTHER = Kind("staleness <= 3", "train_async.py", 3)


def seconds_of(line: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of each part of a step, without evaluations.

    The synchronous loop generates nothing ahead, so there the wait for a batch is `generate`.
    """
    wait_s = line["time/wait_s"] if "time/wait_s" in line else line["time/generate_s"]
    step_s = line["time/step_s"] - line.get("time/eval_s", 0.0)
    return {"step": step_s, "wait": wait_s, "train": line["time/train_s"], "publish": line["time/publish_s"]}


def figures(row: Mapping[str, float]) -> str:
    """Formats one row of the table."""
    parts = f"{row['step']:8.2f}{row['wait']:8.2f}{row['train']:8.2f}{row['publish']:9.2f}"
    return f"{parts}{row['over_max']:10.2f}{row['ratio_to_sync']:11.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--task", choices=TASKS, action="append", help="default: all")
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("engine and trainer need a core each; this process may use one")
    kinds = [ALONE, SYNCHRONOUS, ASYNCHRONOUS, FURTHER]
    if arguments.before is not None:
        before = arguments.before.resolve()
        kinds[2:2] = [Kind("synchronous, before", "train.py", checkout=before)]
        kinds[4:4] = [Kind("staleness <= 1, before", "train_async.py", 1, checkout=before)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        for number in range(arguments.rounds):
            for task in arguments.task or TASKS:
                of_round: dict[str, dict[str, Any]] = {}
                for kind in kinds:
                    row = {"round": number, "task": task, "run": kind.name}
                    row |= kind.seconds(Path(directory), task, arguments.steps)
                    of_round[kind.name] = row
                    halves = of_round[ALONE.name]
                    row["over_max"] = row["step"] / max(halves["wait"], halves["train"])
                    row["ratio_to_sync"] = of_round.get(SYNCHRONOUS.name, row)["step"] / row["step"]
                    rows.append(row)
                    print(f"  {number + 1}/{arguments.rounds} {task:6}{kind.name:24}{figures(row)}", flush=True)
    print(f"\n{'median':30}{'step s':>8}{'wait':>8}{'train':>8}{'publish':>9}{'over max':>10}{'sync / it':>11}")
    for task in arguments.task or TASKS:
        for kind in kinds:
            mine = [row for row in rows if row["run"] == kind.name and row["task"] == task]
            median = {key: statistics.median(row[key] for row in mine) for key in (*PARTS, "over_max", "ratio_to_sync")}
            print(f"{task:6}{kind.name:24}{figures(median)}")
    RESULTS.write_text(json.dumps({"steps": arguments.steps, "aim": AIM, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
