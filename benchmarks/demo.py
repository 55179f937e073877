"""The demo, timed from outside, with its own learning rate and with 0; and the accuracy of its export in transformers.

    python benchmarks/demo.py [--lr0] [--accuracy EXPORT]

Prints a table and writes benchmarks/results/demo.json. `--accuracy` only measures the greedy held-out accuracy of an
exported policy under transformers, in this fresh process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "entrypoints" / "recipes" / "demo.toml"


def run_demo(work: Path, name: str, *options: str) -> dict[str, Any]:
    """Runs the demo under torchrun; returns the summary's figures, the wall time, and the accuracy of the export."""
    run = work / name
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [*launcher, str(ROOT / "entrypoints" / "train.py"), "@", str(RECIPE), *options]
    started = time.monotonic()
    subprocess.run([*command, "--run.dir", str(run), "--model.path", str(work / "model")], check=True)
    wall_s = time.monotonic() - started
    summary = json.loads((run / "summary.json").read_text())
    checked = subprocess.run(
        [sys.executable, __file__, "--accuracy", str(run / "export")], check=True, capture_output=True, text=True
    )
    keys = ("accuracy_before", "accuracy_after", "steps", "seconds", "time_split")
    return {
        "wall_s": wall_s,
        **{key: summary[key] for key in keys},
        "export_accuracy": float(checked.stdout),
        "largest_logprob_difference": summary["facts"]["largest log-prob difference"],
    }


def export_accuracy(export: Path) -> float:
    """Returns the greedy exact-match accuracy on the held-out prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from asyncrl.demo.task import heldout_prompts

    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    right = total = 0
    for record in heldout_prompts():
        ids = torch.tensor([tokenizer.encode(record["prompt"], add_special_tokens=False)])
        with torch.no_grad():
            answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        right += tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True) == record["answer"]
        total += 1
    return right / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr0", action="store_true", help="also with --train.lr 0")
    parser.add_argument("--accuracy", type=Path, metavar="EXPORT")
    arguments = parser.parse_args()
    if arguments.accuracy:
        print(export_accuracy(arguments.accuracy))
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        runs = {"demo": run_demo(Path(directory), "demo")}
        if arguments.lr0:
            runs["demo --train.lr 0"] = run_demo(Path(directory), "lr0", "--train.lr", "0")
    print(f"\n{'run':20} {'wall s':>7} {'before':>7} {'after':>7} {'export':>7} {'steps':>6}")
    for name, row in runs.items():
        figures = f"{row['wall_s']:7.0f} {row['accuracy_before']:7.3f} {row['accuracy_after']:7.3f}"
        print(f"{name:20} {figures} {row['export_accuracy']:7.3f} {row['steps']:6}")
    results = ROOT / "benchmarks" / "results" / "demo.json"
    results.write_text(json.dumps({"cores": os.cpu_count(), "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
