"""Every algorithm trains the demo from the same start: accuracy on held-out words before and after.

    python benchmarks/algorithms.py [--algorithm NAME ...] [--seeds 1] [--steps N]

Runs entrypoints/train.py with the demo's recipe once for each algorithm and seed; adds to
benchmarks/results/algorithms.json, and prints the table of all that it holds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "entrypoints" / "recipes" / "demo.toml"
RESULTS = ROOT / "benchmarks" / "results" / "algorithms.json"
NAMES = ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "gspo_token", "cispo")
AIM = 0.9


def train(work: Path, name: str, seed: int, steps: int | None) -> dict[str, Any]:
    """Trains the demo; returns the figures of its summary."""
    run = work / f"{name}-{seed}"
    options = ["--train.algorithm", name, "--train.seed", str(seed), "--data.seed", str(seed), "--run.export", "false"]
    options += ["--run.dir", str(run), "--model.path", str(work / "model")]
    options += [] if steps is None else ["--train.num-steps", str(steps)]
    command = [sys.executable, str(ROOT / "entrypoints" / "train.py"), "@", str(RECIPE), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((run / "summary.json").read_text())
    row = {key: summary[key] for key in ("accuracy_before", "accuracy_after", "steps", "seconds")}
    return {"algorithm": name, "seed": seed, **row}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=NAMES, action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        for name in arguments.algorithm or NAMES:
            for seed in range(arguments.seeds):
                row = train(Path(directory), name, seed, arguments.steps)
                known = [r for r in known if (r["algorithm"], r["seed"]) != (name, seed)] + [row]
                RESULTS.write_text(json.dumps(known, indent=1) + "\n")
                print(f"{name} seed {seed}: {row['accuracy_before']:.3f} -> {row['accuracy_after']:.3f}", flush=True)
    print("\n| algorithm | seed | steps | before | after |\n|---|---|---|---|---|")
    for row in sorted(known, key=lambda row: (NAMES.index(row["algorithm"]), row["seed"])):
        accuracies = f"{row['accuracy_before']:.3f} | {row['accuracy_after']:.3f}"
        print(f"| `{row['algorithm']}` | {row['seed']} | {row['steps']} | {accuracies} |")
    return 0 if all(row["accuracy_after"] >= AIM for row in known) else 1


if __name__ == "__main__":
    sys.exit(main())
