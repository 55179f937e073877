"""Every algorithm trains the demo from the same start: accuracy on held-out words before and after.

    python benchmarks/algorithms.py [--algorithm NAME ...] [--seeds 1] [--steps N]

A teacher is the exported policy of the first run of grpo, which must be among the algorithms.
Runs entrypoints/train.py with the demo's recipe once for each algorithm and seed; adds to
benchmarks/results/algorithms.json, and prints the table of all that it holds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "entrypoints" / "recipes" / "demo.toml"
RESULTS = ROOT / "benchmarks" / "results" / "algorithms.json"
TEACHER = "grpo"
"""The run whose exported policy teaches."""
VARIANTS: Mapping[str, Mapping[str, object]] = {
    **{
        name: {"train.algorithm": name}
        for name in (
            *("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline"),
            *("gspo", "gspo_token", "cispo", "distill"),
        )
    },
    "grpo, kl as loss": {"algorithm.kl": "loss", "algorithm.kl_coefficient": 0.01},
    "grpo, kl as reward": {"algorithm.kl": "reward", "algorithm.kl_coefficient": 0.01, "algorithm.kl_estimator": "k1"},
    "grpo, corrected": {"algorithm.correction": "truncate", "train.minibatches": 2},
    "grpo and a teacher": {"algorithm.teacher_weight": 0.1},
}
AIM = 0.9


def train(work: Path, name: str, seed: int, steps: int | None) -> dict[str, Any]:
    """Trains the demo; returns the figures of its summary."""
    run = work / f"{name}-{seed}".replace(" ", "-")
    settings = {**VARIANTS[name], "train.seed": seed, "data.seed": seed, "run.dir": run, "model.path": work / "model"}
    if "teach" in name or name == "distill":
        settings["algorithm.teacher"] = work / f"{TEACHER}-0" / "export"
    if steps is not None:
        settings["train.num_steps"] = steps
    options = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    command = [sys.executable, str(ROOT / "entrypoints" / "train.py"), "@", str(RECIPE), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((run / "summary.json").read_text())
    row = {key: summary[key] for key in ("accuracy_before", "accuracy_after", "steps", "seconds")}
    return {"algorithm": name, "seed": seed, **row}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=VARIANTS, action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        for name in arguments.algorithm or VARIANTS:
            for seed in range(arguments.seeds):
                row = train(Path(directory), name, seed, arguments.steps)
                known = [r for r in known if (r["algorithm"], r["seed"]) != (name, seed)] + [row]
                RESULTS.write_text(json.dumps(known, indent=1) + "\n")
                print(f"{name} seed {seed}: {row['accuracy_before']:.3f} -> {row['accuracy_after']:.3f}", flush=True)
    print("\n| algorithm | seed | steps | before | after |\n|---|---|---|---|---|")
    for row in sorted(known, key=lambda row: (list(VARIANTS).index(row["algorithm"]), row["seed"])):
        accuracies = f"{row['accuracy_before']:.3f} | {row['accuracy_after']:.3f}"
        print(f"| `{row['algorithm']}` | {row['seed']} | {row['steps']} | {accuracies} |")
    return 0 if all(row["accuracy_after"] >= AIM for row in known) else 1


if __name__ == "__main__":
    sys.exit(main())
