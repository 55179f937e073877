"""A training step of this checkout and of another, in alternating pairs: CPU time of one rank with one thread.

    python benchmarks/training_step.py --before CHECKOUT [--pairs 6] [--steps 40]

A Qwen3 of 6 layers of 128 with a vocabulary of 512, float32, GRPO on 32 samples of 20 to 220 tokens. Prints the median
step of each run in user milliseconds, which other processes disturb less than wall time, and the ratios of the pairs.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def measure(model: Path, steps: int) -> float:
    """Median user milliseconds of a step, in the checkout that is imported."""
    import torch
    import torch.distributed as dist

    from asyncrl.training.ranks.layout import RankLayout
    from tests.training.batches import make_batch
    from tests.training.megatron.learners import learner_of

    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    if not model.exists():
        from transformers import Qwen3Config, Qwen3ForCausalLM

        sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True)).save_pretrained(model)
    train = {"lr": 1e-4, "max_tokens_per_microbatch": 2048}
    learner = learner_of(RankLayout(0, 1, 0, 1), model={"path": model}, run={"dir": model.parent}, train=train)
    lengths = [(10 + i % 7, 10 + (53 * i) % 200) for i in range(32)]
    batches = [make_batch(lengths, groups=[i // 4 for i in range(32)], vocab_size=512, rollout_id=n) for n in range(4)]
    spent = []
    for step in range(steps + 3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        learner.train(batches[step % 4])
        spent.append(1e3 * (resource.getrusage(resource.RUSAGE_SELF).ru_utime - before))
    return statistics.median(spent[3:])


def run(checkout: Path, model: Path, steps: int) -> float:
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    command = [sys.executable, "-W", "ignore", __file__, "--measure", str(model), "--steps", str(steps)]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout)
    return float(ran.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(measure(arguments.measure, arguments.steps))
        return
    ratios = []
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(arguments.pairs):
            before, now = (
                run(checkout, Path(directory) / "model", arguments.steps)
                for checkout in (arguments.before.resolve(), ROOT)
            )
            ratios.append(now / before)
            print(f"before {before:6.1f} ms   now {now:6.1f} ms   {ratios[-1]:.3f}", flush=True)
    print(f"median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
