"""Nothing outlives the job, in whatever way it ends and at whatever moment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.system.jobs import StartedJob, job, write_recipe

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

LIMIT_S = 15.0

WAYS = ("INT", "TERM", "HUP", "KILL", "agent TERM", "agent KILL", "Ctrl-C twice")


def end(started: StartedJob, way: str) -> None:
    agent, driver = started.process.pid, started.rank_zero().pid
    match way:
        case "Ctrl-C twice":  # torchrun's agent gets the terminal's signal; it forwards both to its ranks
            os.kill(agent, signal.SIGINT)
            time.sleep(1)
            os.kill(agent, signal.SIGINT)
        case "agent TERM" | "agent KILL":
            os.kill(agent, getattr(signal, f"SIG{way.split()[1]}"))
        case _:
            os.kill(driver, getattr(signal, f"SIG{way}"))


def reach(started: StartedJob, moment: str) -> None:
    started.wait_for_event("process_spawned", 60, name="engine-0")
    if moment.startswith("start"):
        time.sleep(float(moment.split("+")[1]))
        return
    kind = {"generate": "group_running", "train": "groups_delivered", "update": "trainer_stepped"}[moment]
    started.wait_for_event(kind, 150)


def assert_it_ends(tmp_path: Path, model: Path, way: str, moment: str) -> None:
    recipe = write_recipe(tmp_path, model, steps=100_000)
    with job(recipe, torchrun=1) as started:
        reach(started, moment)
        started.note_ports()
        end(started, way)
        started.assert_nothing_is_left(LIMIT_S)
        assert started.process.wait(timeout=5) != 0


@pytest.mark.parametrize(
    ("way", "moment"), [("KILL", "start+2"), ("agent TERM", "start+2"), ("Ctrl-C twice", "generate")]
)
def test_nothing_outlives_the_job(tmp_path: Path, tiny_models: tuple[Path, Path], way: str, moment: str) -> None:
    assert_it_ends(tmp_path, tiny_models[0], way, moment)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["start+2", "start+6", "start+12", "generate", "train", "update"])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_outlives_the_job_whatever_ends_it(
    tmp_path: Path, tiny_models: tuple[Path, Path], way: str, moment: str
) -> None:
    assert_it_ends(tmp_path, tiny_models[0], way, moment)
