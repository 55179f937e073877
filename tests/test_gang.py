"""A rank that is killed: torchrun starts all of them again, and the job goes on from its last checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.observability.events import read_events
from tests.tiny_model import CONFIG
from tests.tiny_policy import write_policy
from tests.told import Told

ROOT = Path(__file__).parents[1]
RECIPE = """
[run]
dir = "{dir}/run"
display = "plain"
export = false
[model]
path = "{dir}/model"
[data]
source = "{dir}/prompts.jsonl"
[rollout]
prompts_per_step = 4
samples_per_prompt = 2
max_new_tokens = 16
max_staleness = 1
concurrency = 16
[reward]
function = "length"
workers = 0
args.target = 8
[train]
num_steps = 8
[checkpoint]
every = 2
[engine]
num_engines = 2
[weights]
transport = "disk"
verify = "never"
"""


@pytest.mark.timeout(180)
def test_a_killed_rank_brings_the_gang_back_with_engines_that_hold_the_weights_of_the_checkpoint(
    tmp_path: Path,
) -> None:
    write_policy(tmp_path / "model", context_length=512, config={**CONFIG, "model_type": "qwen3"})
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": "2"}) + "\n" for i in range(32))
    )
    (tmp_path / "recipe.toml").write_text(RECIPE.format(dir=tmp_path))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(ROOT / "tests" / "gang_rank.py"), "@", str(tmp_path / "recipe.toml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout

    told = Told(tmp_path / "run" / "events.jsonl")
    assert told.attempts == 2 and sorted(told.trained) == list(range(8))
    assert sorted(told.groups.elements()) == [f"{ordinal:08d}" for ordinal in range(32)]
    second = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["attempt"] == 1]
    [resumed] = [event["step"] for event in second if event["kind"] == "trainer_resumed"]
    serving = [e["version"] for e in second if e["kind"] == "engine_state" and e["state"] == "serving"]
    assert resumed in (2, 4) and serving[:2] == [f"1.{resumed}"] * 2
    assert [e["step"] for e in second if e["kind"] == "step_finished"] == list(range(resumed + 1, 9))
