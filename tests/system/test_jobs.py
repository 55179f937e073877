"""Whole jobs from launch to summary, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from asyncrl.run.metric_reference import unexplained
from tests.run.read_back import tensorboard_scalars, trackio_rows, wandb_run
from tests.system.jobs import job, run, write_recipe

pytestmark = [pytest.mark.system, pytest.mark.timeout(450)]

EVALUATION = """
[eval]
every = 1
[eval.data]
source = "{data}"
chat_template = false
size = 8
"""


def test_two_ranks_train_evaluate_export_and_leave_nothing(tmp_path: Path, tiny_models: tuple[Path, Path]) -> None:
    recipe = write_recipe(tmp_path, tiny_models[0], steps=2, extra=EVALUATION.format(data=tmp_path / "prompts.jsonl"))
    tracked = ("--track.to", "tensorboard", "wandb", "trackio")
    env = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "run" / "trackio")}
    code, output, started = run(recipe, *tracked, torchrun=2, timeout_s=400, env=env)
    assert code == 0, output

    metrics = [json.loads(line) for line in (started.run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in metrics if "train/loss" in line]
    assert [line["step"] for line in trained] == [1, 2]
    for line in trained:
        assert line["train/logprob_diff_mean"] < 1e-4 and line["train/logprob_diff_max"] < 1e-3
        assert line["rollout/samples"] == 16 and line["rollout/off_version_fraction"] == 0
    assert [line["step"] for line in metrics if "eval/accuracy" in line] == [0, 1, 2]
    assert set().union(*map(unexplained, metrics)) == {"step", "attempt", "time"}, "docs/metrics.md explains all others"
    samples = [json.loads(line) for line in (started.run_dir / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in samples if line["kind"] == "train"] == [1] * 16 + [2] * 16
    assert len([line for line in samples if line["kind"] == "eval"]) == 3 * 8

    rewards = [(line["step"], line["rollout/reward_mean"]) for line in trained]
    rows, told = wandb_run(started.run_dir)
    assert [(row["step"], row["rollout/reward_mean"]) for row in rows if "rollout/reward_mean" in row] == rewards
    assert told["job"]["router_url"].startswith("http://127.0.0.1:") and told["train"]["num_steps"] == 2
    assert trackio_rows(started.run_dir, "asyncrl", "rollout/reward_mean") == rewards
    assert tensorboard_scalars(started.run_dir, "rollout/reward_mean") == [
        (step, pytest.approx(reward)) for step, reward in rewards
    ]

    summary = json.loads((started.run_dir / "summary.json").read_text())
    assert {"accuracy_before", "accuracy_after", "seconds", "steps", "time_split"} <= summary.keys()
    assert summary["steps"] == 2 and summary["outcome"] == "finished"
    assert sum(summary["time_split"].values()) == pytest.approx(summary["seconds"], rel=0.01)
    assert (started.run_dir / "export" / "model.safetensors").exists()

    kinds = [event["kind"] for event in started.events()]
    assert kinds[0] == "job_started" and kinds[-1] == "job_ended"
    assert kinds.count("weights_published") == 3 and kinds.count("groups_trained") == 2
    published = [event["version"] for event in started.events() if event["kind"] == "weights_published"]
    assert published == ["0.0", "0.1", "0.2"]


@pytest.mark.long
def test_a_job_that_keeps_no_copy_of_its_weights_publishes_them_again_when_its_engine_dies(
    tmp_path: Path, tiny_models: tuple[Path, Path]
) -> None:
    recipe = write_recipe(tmp_path, tiny_models[0], steps=3)
    options = ("--weights.keep_published", "never", "--rollout.max_new_tokens", "160", "--rollout.ignore_eos")
    with job(recipe, *options) as started:
        started.wait_for_event("weights_published", 150, version="0.1")  # from here on it generates
        [engine] = [e for e in started.events() if e["kind"] == "process_spawned" and e["name"] == "engine-0"]
        os.kill(engine["pid"], signal.SIGKILL)
        code = started.process.wait(timeout=200)
        assert code == 0, started.text()
        started.assert_nothing_is_left(within_s=15)
    events = started.events()
    published = [event["version"] for event in events if event["kind"] == "weights_published"]
    assert published == ["0.0", "0.1", "0.1", "0.2", "0.3"]
    trained = [event["group_ids"] for event in events if event["kind"] == "groups_trained"]
    assert len({group for groups in trained for group in groups}) == 3 * 4
