"""Half an hour of asynchronous training while engines and router are killed: it learns, holds its books, and grows not.

The policy of the demo, with a staleness of up to two steps.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.results import keep
from tests.system.jobs import ROOT, StartedJob, job

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(4000)]

RECIPE = ROOT / "entrypoints" / "recipes" / "demo.toml"
MAX_STALENESS = 2
SAMPLED_EVERY_S = 2.0
KINDS = ("kill engine", "kill scheduler", "stop scheduler", "kill router")
MAX_GROWTH = 0.05
"""Of the driver's memory, from the end of the first third to the end, by the slope of a line through its samples."""


@dataclass
class Watched:
    """What a soak saw."""

    faults: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, resident bytes of the driver)."""


def soak(directory: Path, minutes: float, seed: int = 0) -> dict[str, Any]:
    """Trains for so long, with a fault whenever the engine has served for a while; returns what is found."""
    recipe = directory / "recipe.toml"
    recipe.write_text(RECIPE.read_text())
    options = ["--run.dir", str(directory / "run"), "--run.display", "plain", "--train.num_steps", "100000"]
    options += ["--model.path", str(directory / "model"), "--rollout.max_staleness", str(MAX_STALENESS)]
    options += ["--checkpoint.every", "20", "--engine.max_restarts", "1000"]
    with job(recipe, *options, entry=ROOT / "entrypoints" / "train_async.py") as started:
        started.wait_for_event("step_finished", 600)
        watched = watch(started, time.monotonic() + 60 * minutes, random.Random(seed))
        started.process.send_signal(signal.SIGUSR1)
        assert started.process.wait(timeout=400) == 0, started.text()
        started.assert_nothing_is_left(within_s=15)
    return found_in(started, watched)


def watch(started: StartedJob, until: float, dice: random.Random) -> Watched:
    watched, began = Watched(), time.monotonic()
    driver = psutil.Process(started.process.pid)
    next_fault = began + dice.uniform(10, 30)
    while (now := time.monotonic()) < until:
        assert started.process.poll() is None, started.text()
        watched.memory.append((now - began, driver.memory_info().rss))
        if now >= next_fault and until - now > 60 and serves(started):
            kind = dice.choice(KINDS)
            strike(started, kind)
            watched.faults.append(kind)
            next_fault = now + dice.uniform(45, 120)
        time.sleep(SAMPLED_EVERY_S)
    return watched


def serves(started: StartedJob) -> bool:
    states = [event["state"] for event in started.events() if event["kind"] == "engine_state"]
    return bool(states) and states[-1] == "serving"


def strike(started: StartedJob, kind: str) -> None:
    how, _, whom = kind.partition(" ")
    signum = signal.SIGKILL if how == "kill" else signal.SIGSTOP
    if whom == "scheduler":
        [target] = [member for member in started.members() if "sglang::schedul" in member.name()]
    else:
        name = "engine-0" if whom == "engine" else "router"
        pids = [e["pid"] for e in started.events() if e["kind"] == "process_spawned" and e["name"] == name]
        target = psutil.Process(pids[-1])
    target.send_signal(signum)


def found_in(started: StartedJob, watched: Watched) -> dict[str, Any]:
    """Figures of the run directory; asserts what must hold however long it ran."""
    events = started.events()
    ended: Counter[str] = Counter()
    for event in events:
        if event["kind"] == "groups_trained":
            ended.update(event["group_ids"])
        elif event["kind"] in ("group_dropped", "group_filtered"):
            ended[event["group_id"]] += 1
    admitted = Counter(event["group_id"] for event in events if event["kind"] == "group_admitted")
    assert set(admitted.values()) == {1} and ended == admitted, "a group was lost, or ended twice"

    lines = [json.loads(line) for line in (started.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert max(line["rollout/staleness_max"] for line in steps) <= MAX_STALENESS
    rewards = [line["rollout/reward_mean"] for line in steps]
    edge = max(1, min(10, len(rewards) // 4))
    growth, median = memory_growth(watched.memory)
    return {
        "seconds": round(watched.memory[-1][0]),
        "steps": len(steps),
        "faults": dict(Counter(watched.faults)),
        "requests_failed_and_sent_again": sum(event["kind"] == "request_failed" for event in events),
        "groups": {
            "admitted": len(admitted),
            "trained": sum(len(e["group_ids"]) for e in events if e["kind"] == "groups_trained"),
            "dropped": dict(Counter(e["reason"] for e in events if e["kind"] == "group_dropped")),
        },
        "staleness_max": max(line["rollout/staleness_max"] for line in steps),
        "reward_first": round(float(np.mean(rewards[:edge])), 3),
        "reward_last": round(float(np.mean(rewards[-edge:])), 3),
        "driver_mib": round(median / 2**20),
        "driver_growth": round(growth, 4),
    }


def memory_growth(samples: list[tuple[float, int]]) -> tuple[float, float]:
    """(growth over the last two thirds by the slope of a line, as a part of the median; the median in bytes)."""
    settled = np.array(samples[len(samples) // 3 :], np.float64)
    seconds, size = settled[:, 0], settled[:, 1]
    slope = np.polyfit(seconds, size, 1)[0]
    median = float(np.median(size))
    return float(slope * (seconds[-1] - seconds[0]) / median), median


def test_half_an_hour_of_faults_costs_no_group_no_memory_and_no_learning(tmp_path: Path) -> None:
    found = soak(tmp_path, minutes=30)
    keep("soak", found)
    assert sum(found["faults"].values()) >= 10
    assert found["reward_last"] > found["reward_first"] + 0.2
    assert found["driver_growth"] <= MAX_GROWTH
