"""Whole jobs over scripted engines: killed ranks come back from the last checkpoint, stopped jobs lose nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.observability.events import read_events
from tests.tiny_model import CONFIG
from tests.tiny_policy import write_policy
from tests.told import Told

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
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
resume = "never"
[engine]
num_engines = 2
[weights]
transport = "disk"
verify = "never"
"""

ENVIRON = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
RANK = str(ROOT / "tests" / "gang_rank.py")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_policy(tmp_path / "model", context_length=512, config={**CONFIG, "model_type": "qwen3"})
    prompts = (json.dumps({"prompt": f"{i}+1=", "answer": "2"}) + "\n" for i in range(32))
    (tmp_path / "prompts.jsonl").write_text("".join(prompts))
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(dir=tmp_path))
    return path


@pytest.mark.timeout(450)
def test_a_killed_rank_brings_the_gang_back_with_engines_that_hold_the_weights_of_the_checkpoint(recipe: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [sys.executable, *torchrun, RANK, "@", str(recipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
        env=ENVIRON,
    )
    assert done.returncode == 0, done.stdout

    events = recipe.parent / "run" / "events.jsonl"
    told = Told(events)
    assert told.attempts == 2 and sorted(told.trained) == list(range(8))
    assert sorted(told.groups.elements()) == [f"{ordinal:08d}" for ordinal in range(32)]
    second = [event for event in read_events(events) if event["attempt"] == 1]
    [resumed] = [event["step"] for event in second if event["kind"] == "trainer_resumed"]
    serving = [e["version"] for e in second if e["kind"] == "engine_state" and e["state"] == "serving"]
    assert resumed in (2, 4) and serving[:2] == [f"1.{resumed}"] * 2
    assert [e["step"] for e in second if e["kind"] == "step_finished"] == list(range(resumed + 1, 9))


@pytest.mark.timeout(450)
def test_a_job_that_is_stopped_in_a_step_and_after_one_loses_none_and_is_taken_up_again(recipe: Path) -> None:
    """Responses take 0.4 s and steps no time, but for the one that a SIGTERM finds in progress."""
    command = [sys.executable, RANK, "@", str(recipe), "--checkpoint.every", "1000", "--rollout.ignore_eos"]
    command += ["--rollout.max_new_tokens", "200", "--checkpoint.resume", "auto", "--run.if_exists", "resume"]
    command += ["--run.stop_grace_s", "28", "--train.num_steps"]  # so that a slow disk is no reason to save nothing
    events = recipe.parent / "run" / "events.jsonl"

    def told(kind: str, field: str = "step") -> list[Any]:
        return [e[field] for e in read_events(events) if e["kind"] == kind] if events.exists() else []

    def is_saved(times: int) -> bool:
        saved = told("checkpoint_written")
        return len(saved) == times and saved[-1] == told("trainer_stepped")[-1]

    stopped = subprocess.run([*command, "1000"], env=ENVIRON | {"STOP_IN_A_STEP": "1"}, check=False)
    assert stopped.returncode == 143
    assert is_saved(times=1), told("fault_seen", "what")

    before = len(told("step_finished"))
    with subprocess.Popen([*command, "1000"], env=ENVIRON, stdout=subprocess.DEVNULL) as job:
        while len(told("step_finished")) < before + 3:
            assert job.poll() is None
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=60) == 0
    assert is_saved(times=2), told("fault_seen", "what")

    end = told("checkpoint_written")[-1] + 2
    resumed = subprocess.run([*command, str(end)], env=ENVIRON, check=False)
    assert resumed.returncode == 0
    all_of_it = Told(events)
    assert all_of_it.attempts == 3 and all_of_it.rolled_back == 0 and sorted(all_of_it.trained) == list(range(end))
    assert all_of_it.groups == Counter(f"{ordinal:08d}" for ordinal in range(4 * end))
