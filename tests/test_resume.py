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
from tests.results import keep
from tests.tiny_policy import write_policy
from tests.told import Told

PROMPTS, GROUPS = 12, 3
LONGEST_S = 120.0

Run = Callable[[str, int, int, tuple[int, float] | None], int | None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the loop under a name, in a process of its own; returns its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([resumable_job.__name__, "transformers.models.auto.tokenization_auto"])
    policy = write_policy(tmp_path / "policy")
    prompts = tmp_path / "train.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": "yes"}) + "\n" for i in range(PROMPTS)))

    def run(name: str, max_staleness: int, epochs: int, kill: tuple[int, float] | None) -> int | None:
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
            "train": {"num_steps": None, "num_epochs": epochs},
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
    killed = exactly_once(run, tmp_path, max_staleness, kills=5, epochs=8, moments=(50, 65))  # after a checkpoint
    assert killed.restored if max_staleness else killed.rolled_back


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_job_that_is_killed_a_hundred_times_trains_every_group_once(run: Run, tmp_path: Path) -> None:
    """At moments of all kinds: before the first checkpoint too, while it resumes, and while a checkpoint is written."""
    killed = exactly_once(run, tmp_path, 2, kills=100, epochs=100, moments=(5, 90))
    found = {
        "kills": 100,
        "steps": len(killed.trained),
        "groups_trained": len(killed.groups),
        "groups_skipped": 0,
        "groups_repeated": 0,
        "groups_rolled_back": killed.rolled_back,
        "groups_restored": killed.restored,
    }
    keep("kills_scripted", found)


def exactly_once(
    run: Run, directory: Path, max_staleness: int, *, kills: int, epochs: int, moments: tuple[int, int]
) -> Told:
    """Kills a job so often, each time after some of its events, and holds what it trained against one left alone."""
    steps = epochs * PROMPTS // GROUPS
    assert run("whole", max_staleness, epochs, None) == 0
    whole = Told(directory / "whole" / "events.jsonl")
    assert whole.attempts == 1 and len(whole.groups) == steps * GROUPS

    dice = random.Random(max_staleness)
    for _ in range(kills):
        moment = dice.randint(*moments), dice.uniform(0, 0.01)  # a step has 11 events
        assert run("killed", max_staleness, epochs, moment) == -signal.SIGKILL
    assert run("killed", max_staleness, epochs, None) == 0
    killed = Told(directory / "killed" / "events.jsonl")
    assert killed.groups == whole.groups
    assert sorted(killed.trained) == list(range(steps))
    assert killed.prompts == whole.prompts
    assert killed.attempts <= 1 + kills, "what ended before anything came of it is no attempt"
    return killed
