"""Exactly once: what a job trains, however often it is killed, is what it trains undisturbed."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import resumable_job
from tests.tiny_policy import write_policy
from tests.told import Told

PROMPTS, GROUPS, EPOCHS, KILLS = 12, 3, 8, 5
STEPS = EPOCHS * PROMPTS // GROUPS
LONGEST_S = 60.0

Run = Callable[[str, int, tuple[int, float] | None], int | None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the loop under a name, in a process of its own; returns its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([resumable_job.__name__, "transformers.models.auto.tokenization_auto"])
    policy = write_policy(tmp_path / "policy")
    prompts = tmp_path / "train.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": "yes"}) + "\n" for i in range(PROMPTS)))

    def run(name: str, max_staleness: int, kill: tuple[int, float] | None) -> int | None:
        config: dict[str, Any] = {
            "model": {"path": policy},
            "data": {"source": str(prompts)},
            "reward": {"function": "length", "args": {"target": 8}, "workers": 0},
            "rollout": {
                "prompts_per_step": GROUPS,
                "samples_per_prompt": 2,
                "max_new_tokens": 8,
                "concurrency": 8,
                "max_staleness": max_staleness,
            },
            "train": {"num_steps": None, "num_epochs": EPOCHS},
            "checkpoint": {"every": 3},
            "run": {"dir": tmp_path / name, "if_exists": "resume", "export": False},
        }
        entrypoint = "train_async" if max_staleness else "train"
        process = context.Process(target=resumable_job.run_job, args=(config, entrypoint, kill))
        process.start()
        process.join(LONGEST_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            pytest.fail(f"the job hung for {LONGEST_S} s")
        return process.exitcode

    return run


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_job_that_is_killed_again_and_again_trains_every_group_once(
    run: Run, tmp_path: Path, max_staleness: int
) -> None:
    assert run("whole", max_staleness, None) == 0
    whole = Told(tmp_path / "whole" / "events.jsonl")
    assert whole.attempts == 1 and len(whole.groups) == STEPS * GROUPS

    dice = random.Random(max_staleness)
    for _ in range(KILLS):
        moment = dice.randint(50, 65), dice.uniform(0, 0.01)  # a step has 11 events: after the first checkpoint
        assert run("killed", max_staleness, moment) == -signal.SIGKILL
    assert run("killed", max_staleness, None) == 0
    killed = Told(tmp_path / "killed" / "events.jsonl")
    assert killed.groups == whole.groups
    assert sorted(killed.trained) == list(range(STEPS))
    assert killed.prompts == whole.prompts
    assert killed.attempts == 1 + KILLS
    assert killed.restored if max_staleness else killed.rolled_back
