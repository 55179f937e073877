"""Trackers: what they get of a run, read back with their own libraries, and what they cannot do to it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asyncrl.config import Config
from asyncrl.config.layout import DRIVER_NODE
from asyncrl.config.reading.toml import config_toml
from asyncrl.host import EngineHost
from asyncrl.observability.events import EventLog
from asyncrl.observability.metrics import MetricsLog
from asyncrl.observability.trackers.sink import TrackedRun
from asyncrl.observability.trackers.sinks import TensorBoardSink
from asyncrl.run.trackers import start_trackers
from tests.rollout.fleet import eventually
from tests.run.jobs import a_job
from tests.run.read_back import tensorboard_scalars, trackio_rows, wandb_run

pytestmark = pytest.mark.anyio

SINKS = "tests.run.sinks"
ROUTER = "http://127.0.0.1:3000"


@asynccontextmanager
async def tracked(
    directory: Path, *, signal: bool = False, attempt: int = 0, **track: Any
) -> AsyncIterator[tuple[Any, MetricsLog]]:
    """A job that tracks its run in `directory`, and the log of its metrics; the job ends with the block."""
    (directory / "logs").mkdir()
    config = Config.model_validate({"track": track, "run": {"dir": directory, "stop_grace_s": 4.0}})
    (directory / "config.toml").write_text(config_toml(config))
    events = EventLog(None)
    async with EngineHost.start(directory / "logs", events) as host, anyio.create_task_group() as tasks:
        job = a_job(tasks, config=config)
        job.hosts, job.events = {DRIVER_NODE: host}, events
        job.directory = SimpleNamespace(path=directory, attempt=attempt, logs=directory / "logs")
        metrics = MetricsLog(directory / "metrics.jsonl", attempt)
        async with job.disposal:
            await start_trackers(job, ROUTER)
            yield job, metrics
            if signal:
                for told in job.on_stop_now:
                    await told()
        metrics.close()
        tasks.cancel_scope.cancel()


async def test_a_sink_learns_of_the_run_and_gets_every_line(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    args = {f"{SINKS}:Kept": {"file": str(kept)}}
    async with tracked(tmp_path, to=[f"{SINKS}:Kept"], args=args) as (_, metrics):
        for step in range(1, 200):
            metrics.write(step, {"train/loss": step / 10})
        metrics.write(200, {"train/loss": math.nan, "train/grad_norm": -math.inf})
    (name, job, lr), *lines = json.loads(kept.read_text())
    assert name == tmp_path.name and lr == Config().train.lr
    assert job == {"directory": str(tmp_path), "attempt": 0, "router_url": ROUTER}
    assert [step for step, _ in lines] == list(range(1, 201))
    assert lines[-1][1] == {"train/loss": "nan", "train/grad_norm": "-inf"}


async def test_a_sink_gets_the_last_line_of_a_job_that_is_cancelled(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    args = {f"{SINKS}:Kept": {"file": str(kept)}}
    async with tracked(tmp_path, to=[f"{SINKS}:Kept"], args=args) as (job, metrics):
        metrics.write(1, {"train/loss": math.nan})
        job.task_group.cancel_scope.cancel()  # as by a failure beside the loop
    assert json.loads(kept.read_text())[1:] == [[1, {"train/loss": "nan"}]]


async def test_a_sink_that_hangs_for_ever_costs_no_step_and_a_bounded_end(tmp_path: Path) -> None:
    async with tracked(tmp_path, signal=True, to=[f"{SINKS}:Hanging"]) as (job, metrics):
        metrics.write(1, {"train/loss": 1.0})
        await anyio.sleep(1.0)  # it hangs now, or while it still starts
        longest = 0.0
        for step in range(2, 300):
            began = time.monotonic()
            metrics.write(step, {f"train/m{i}": 1.0 for i in range(100)})
            longest = max(longest, time.monotonic() - began)
            await anyio.lowlevel.checkpoint()
        assert longest < 0.5
        ends = time.monotonic()
    assert time.monotonic() - ends < 8.0
    (note,) = job.record.notes
    assert "Hanging did not take all metrics within 1 s of the end; metrics.jsonl has them" in note
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 299


async def test_a_sink_that_fails_is_told_once_and_the_others_go_on(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    args = {f"{SINKS}:Kept": {"file": str(kept)}}
    async with tracked(tmp_path, to=[f"{SINKS}:Failing", f"{SINKS}:Kept"], args=args) as (job, metrics):
        await eventually(lambda: job.record.notes, 60)
        metrics.write(1, {"train/loss": 1.0})
    (note,) = job.record.notes
    assert "Failing ended with 1: ValueError: not logged in. The run goes on" in note
    assert len(json.loads(kept.read_text())) == 2


async def test_a_tracker_that_is_told_in_vain_does_not_hold_up_the_start(tmp_path: Path) -> None:
    (tmp_path / "trackers").write_text("a file where the folder should be")
    async with tracked(tmp_path, to=[f"{SINKS}:Kept"]) as (job, _):
        pass
    (note,) = job.record.notes
    assert note.startswith("nothing is tracked: ")


async def test_tensorboard_wandb_and_trackio_runs_are_read_back_by_their_own_libraries_each_row_with_its_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    args = {"wandb": {"mode": "offline"}}
    to = ["tensorboard", "wandb", "trackio"]
    async with tracked(tmp_path, attempt=2, to=to, args=args, project="p", name="r") as (job, metrics):
        metrics.write(0, {"eval/accuracy": 0.25})
        for step in (1, 2, 3):
            metrics.write(step, {"rollout/reward_mean": step / 4, "train/loss": -float(step)})
        await anyio.sleep(3.0)
    assert job.record.notes == []
    rewards = [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert tensorboard_scalars(tmp_path, "rollout/reward_mean") == rewards
    assert tensorboard_scalars(tmp_path, "eval/accuracy") == [(0, 0.25)]
    rows, config = wandb_run(tmp_path)
    assert [(row["step"], row["rollout/reward_mean"]) for row in rows if "rollout/reward_mean" in row] == rewards
    assert {row["attempt"] for row in rows} == {2}, "so that steps of a resumed run can be told from rolled-back ones"
    assert config["job"]["router_url"] == ROUTER and config["train"]["lr"] == Config().train.lr
    assert trackio_rows(tmp_path, "p", "rollout/reward_mean") == rewards
    assert trackio_rows(tmp_path, "p", "attempt") == [(step, 2) for step in range(4)]


def test_tensorboard_shows_a_resumed_run_without_the_steps_that_were_rolled_back(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(config_toml(Config()))
    for attempt, lines in enumerate(
        [
            [(0, "eval/accuracy", 0.25), *((step, "train/loss", float(step)) for step in (1, 2, 3, 4))],
            [(2, "eval/accuracy", 0.5), *((step, "train/loss", step + 0.5) for step in (3, 4, 5))],
        ]
    ):
        run = TrackedRun.read(tmp_path, attempt=attempt, router_url=None)
        sink = TensorBoardSink(run)
        for step, name, value in lines:
            sink.log(step, float(attempt), {name: value})
        sink.finish()
    assert tensorboard_scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5), (5, 5.5)]
    assert tensorboard_scalars(tmp_path, "eval/accuracy") == [(0, 0.25), (2, 0.5)]
