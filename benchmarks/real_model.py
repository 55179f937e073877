"""Checks from the metrics of a finished run whether a real model improved.

    torchrun --nproc-per-node 1 entrypoints/train.py @ entrypoints/recipes/smollm2.toml
    python benchmarks/real_model.py runs/smollm2

Compares the mean reward of the last 5 steps with that of the first 5, in standard errors of the difference (from the
variance among the steps). Prints a table, copies the curve to docs/ and writes benchmarks/results/real_model.json.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
from pathlib import Path

from asyncrl.observability.metrics import read_metrics

ROOT = Path(__file__).parents[1]
ENDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    steps = [line for line in read_metrics(run / "metrics.jsonl") if "train/loss" in line]
    rewards = [line["rollout/reward_mean"] for line in steps]
    first, last = rewards[:ENDS], rewards[-ENDS:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / ENDS)
    result = {
        "steps": len(steps),
        "first_mean": statistics.mean(first),
        "last_mean": statistics.mean(last),
        "standard_errors": (statistics.mean(last) - statistics.mean(first)) / error,
        "logprob_diff_mean": statistics.mean(line["train/logprob_diff_mean"] for line in steps),
        "logprob_diff_max": max(line["train/logprob_diff_max"] for line in steps),
        "median_step_s": statistics.median(line["time/step_s"] for line in steps),
        "median_trained_tokens_per_s": statistics.median(line["train/tokens"] / line["time/train_s"] for line in steps),
        "curve": [
            {"step": line["step"], "reward": round(line["rollout/reward_mean"], 4), "seconds": round(elapsed, 1)}
            for line, elapsed in zip(steps, _elapsed(steps), strict=True)
        ],
    }
    print("step   seconds  reward")
    for point in result["curve"]:
        print(f"{point['step']:4} {point['seconds']:9.1f} {point['reward']:7.3f}")
    ends = f"first {ENDS} steps {result['first_mean']:.3f}, last {ENDS} steps {result['last_mean']:.3f}"
    print(f"mean reward: {ends}, {result['standard_errors']:.1f} standard errors apart")
    (ROOT / "benchmarks" / "results" / "real_model.json").write_text(json.dumps(result, indent=1) + "\n")
    shutil.copy(run / "reward_curve.png", ROOT / "docs" / "smollm2_reward.png")


def _elapsed(steps: list[dict[str, float]]) -> list[float]:
    """Returns the seconds from the beginning of the first step to the end of each step."""
    begun = steps[0]["time"] - steps[0]["time/step_s"]
    return [line["time"] - begun for line in steps]


if __name__ == "__main__":
    main()
