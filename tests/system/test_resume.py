"""Whole jobs that are stopped, killed and resumed, with the real engine, router and trainer."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.results import keep
from tests.system.jobs import ROOT, StartedJob, job, run, write_recipe
from tests.told import Told

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

TRAIN_ASYNC = ROOT / "entrypoints" / "train_async.py"
START_S = 200.0


@pytest.mark.long
def test_a_killed_rank_brings_the_gang_back_with_the_weights_of_the_last_checkpoint(
    tmp_path: Path, tiny_models: tuple[Path, Path]
) -> None:
    recipe = write_recipe(tmp_path, tiny_models[0], steps=6, extra="[checkpoint]\nevery = 2\n")
    options = ("--rollout.max_staleness", "1", "--run.export", "false")
    with job(recipe, *options, torchrun=2, max_restarts=1, entry=TRAIN_ASYNC) as started:
        started.wait_for_event("checkpoint_written", START_S)
        os.kill(started.rank(1).pid, signal.SIGKILL)
        assert started.process.wait(timeout=START_S) == 0, started.text()
        started.assert_nothing_is_left(within_s=15)

    told = Told(started.run_dir / "events.jsonl")
    assert told.attempts == 2 and sorted(told.trained) == list(range(6))
    assert sorted(told.groups.elements()) == [f"{ordinal:08d}" for ordinal in range(24)]
    second = [event for event in started.events() if event["attempt"] == 1]
    [resumed] = [event["step"] for event in second if event["kind"] == "trainer_resumed"]
    serving = [e["version"] for e in second if e["kind"] == "engine_state" and e["state"] == "serving"]
    assert resumed >= 2 and serving[0] == f"1.{resumed}", "no engine serves before it holds the checkpoint's weights"
    assert [e["step"] for e in second if e["kind"] == "step_finished"] == list(range(resumed + 1, 7))


def test_a_job_that_sigterm_stops_between_two_steps_is_saved_and_its_batches_train_again_to_the_last_bit(
    tmp_path: Path, tiny_models: tuple[Path, Path], shared_engine: str
) -> None:
    checkpoint = "[checkpoint]\nevery = 100\n"
    recipe = write_recipe(tmp_path, tiny_models[0], steps=100, engine_url=shared_engine, extra=checkpoint)
    # Long answers of which little is trained: the signal meets the engines at work, not the trainer.
    options = ("--rollout.max_new_tokens", "300", "--rollout.ignore_eos", "--debug.save_rollouts")
    with job(recipe, *options) as started:
        started.wait_for("two steps", lambda: len(kinds(started, "step_finished")) >= 2, START_S)
        health = [sys.executable, "-c", "from asyncrl.cli import main; main()", "health", str(started.run_dir)]
        told = subprocess.run(health, capture_output=True, text=True, timeout=60)
        assert (told.returncode, told.stdout.splitlines()[2].split()[:2]) == (0, ["external-0", "actor"]), told
        last = len(kinds(started, "step_finished"))
        os.kill(started.process.pid, signal.SIGTERM)
        started.assert_nothing_is_left(within_s=15)
        assert started.process.wait(timeout=5) == 128 + signal.SIGTERM
        assert not (started.run_dir / "control.sock").exists()
    [written] = kinds(started, "checkpoint_written")
    assert written["step"] in (last, last + 1) and (Path(written["path"]) / "manifest.json").exists(), started.text()

    replayed = ("--debug.train_only", "--debug.load_rollouts", str(started.run_dir / "rollouts"))
    options = ("--run.dir", str(tmp_path / "replay"), "--run.export", "false", *options[:3])
    code, output, _ = run(recipe, *options, *replayed, timeout_s=120)
    assert code == 0, output
    assert "all as recorded within 0.0001 (largest relative difference 0.0e+00)" in output, output
    lines = [json.loads(line) for line in (tmp_path / "replay" / "comparison.jsonl").read_text().splitlines()]
    assert len(lines) >= last and all(line["same"] is not False for line in lines)
    assert all("train/loss" in line["metrics"] and line["logprobs"]["largest"] < 1e-3 for line in lines[:last])


def test_engines_without_a_trainer_fill_batches_that_a_trainer_without_engines_takes(
    tmp_path: Path, tiny_models: tuple[Path, Path], shared_engine: str
) -> None:
    recipe = write_recipe(tmp_path, tiny_models[0], steps=3, engine_url=shared_engine)
    code, output, started = run(recipe, "--debug.rollout_only", "--debug.save_rollouts", timeout_s=START_S)
    assert code == 0, output
    assert [event["kind"] for event in started.events()].count("groups_trained") == 3
    assert not kinds(started, "trainer_ready")
    replayed = ("--debug.train_only", "--debug.load_rollouts", str(started.run_dir / "rollouts"))
    code, output, _ = run(recipe, "--run.dir", str(tmp_path / "replay"), *replayed, timeout_s=120)
    assert code == 0, output
    lines = [json.loads(line) for line in (tmp_path / "replay" / "comparison.jsonl").read_text().splitlines()]
    assert [(line["step"], line["same"]) for line in lines] == [(1, None), (2, None), (3, None)]
    assert lines[0]["logprobs"]["largest"] < 1e-3, "the engines served the model that the trainer begins with"


def kinds(started: StartedJob, kind: str) -> list[dict[str, Any]]:
    return [event for event in started.events() if event["kind"] == kind]


@contextmanager
def attempt_of(recipe: Path, attempt: int, options: tuple[str, ...]) -> Iterator[StartedJob]:
    with job(recipe, *options, entry=TRAIN_ASYNC) as started:
        started.wait_for_event("job_started", 60, attempt=attempt)
        yield started


def wait_for_moment(started: StartedJob, attempt: int, most_steps: int, dice: random.Random) -> str:
    """Returns at the moment in which this attempt is to be killed, and says which it is.

    The second attempt has just been started then, the third is in the midst of its resumption: the trainer has its
    checkpoint, the engines have not been given its weights. Any other has trained some steps, and left a checkpoint.
    """
    if attempt == 2:
        started.wait_for_event("trainer_resumed", START_S, attempt=attempt)
        moment = "as its trainer has resumed"
    elif attempt == 1:
        time.sleep(delay_s := dice.uniform(0, 10))
        moment = f"{delay_s:.1f} s after its start"
    else:
        more, delay_s = dice.randint(2, most_steps), dice.uniform(0, 1)
        begun, moment = len(kinds(started, "step_finished")), f"{delay_s:.1f} s after {more} steps"
        started.wait_for(moment, lambda: len(kinds(started, "step_finished")) >= begun + more, 900)
        started.wait_for_event("checkpoint_written", 60)
        time.sleep(delay_s)
    begun_to_train = any(event["attempt"] == attempt for event in kinds(started, "loop_started"))
    assert begun_to_train is (attempt not in (1, 2)), started.text()
    return moment


def exactly_once(directory: Path, model: Path, kills: int, steps: int, seed: int = 0) -> dict[str, Any]:
    """Kills a job so often, at random moments; holds what it trained against a job left alone. Returns the figures.

    Its answers are short and its trainer takes a forward pass for each of them, so that finished groups wait for the
    trainer whenever a checkpoint is written.
    """
    dice, prompts = random.Random(seed), 16
    options = ("--rollout.max_staleness", "2", "--run.if_exists", "resume", "--run.export", "false")
    options += ("--rollout.max_new_tokens", "4", "--train.max_tokens_per_microbatch", "5")
    checkpoint = "[checkpoint]\nevery = 2\n"
    for name in ("whole", "killed"):
        (directory / name).mkdir()
    recipe = write_recipe(directory / "whole", model, steps=steps, prompts=prompts, extra=checkpoint)
    code, output, undisturbed = run(recipe, *options, timeout_s=900, entry=TRAIN_ASYNC)
    assert code == 0, output
    whole = Told(undisturbed.run_dir / "events.jsonl")

    recipe = write_recipe(directory / "killed", model, steps=steps, prompts=prompts, extra=checkpoint)
    moments = []
    for attempt in range(kills):
        with attempt_of(recipe, attempt, options) as started:
            moments.append(wait_for_moment(started, attempt, steps // (3 * kills), dice))  # leaves steps to do
            assert started.process.poll() is None, started.text()
            started.kill_all()
    code, output, _ = run(recipe, *options, timeout_s=900, entry=TRAIN_ASYNC)
    assert code == 0, output
    killed = Told(started.run_dir / "events.jsonl")
    assert killed.groups == whole.groups, "a group was lost or trained twice"
    assert sorted(killed.trained) == sorted(whole.trained) == list(range(steps))
    assert killed.prompts == whole.prompts and killed.attempts == 1 + kills
    assert killed.restored > 0, "no group that was finished, and not trained, came back"
    return {
        "kills": kills,
        "moments": moments,
        "steps": steps,
        "groups_trained": len(killed.groups),
        "groups_skipped": 0,
        "groups_repeated": 0,
        "groups_rolled_back": killed.rolled_back,
        "groups_restored": killed.restored,
    }


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_a_real_job_that_is_killed_five_times_trains_every_group_once(
    tmp_path: Path, tiny_models: tuple[Path, Path]
) -> None:
    found = exactly_once(tmp_path, tiny_models[0], kills=5, steps=100)
    keep("kills_real", found)
