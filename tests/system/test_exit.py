"""Nothing outlives the job, in whatever way it ends and at whatever moment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.system.jobs import StartedJob, job, write_recipe

pytestmark = [pytest.mark.system, pytest.mark.timeout(450)]

LIMIT_S = 15.0

WAYS = ("INT", "TERM", "HUP", "KILL", "agent INT", "agent TERM", "agent HUP", "agent KILL", "Ctrl-C twice")

SLOW = {
    "generate": ("--rollout.max-new-tokens", "400", "--rollout.ignore-eos"),
    "train": (
        *("--rollout.prompts-per-step", "32", "--rollout.samples-per-prompt", "8"),
        *("--train.max-tokens-per-microbatch", "40"),  # one sample
    ),
}
"""What makes a moment last for seconds, so that a signal lands in it."""
SLOW["update"] = SLOW["train"]


def end(started: StartedJob, way: str) -> None:
    agent, driver = started.process.pid, started.rank_zero().pid
    match way:
        case "Ctrl-C twice":  # torchrun's agent gets the terminal's signal; it forwards both to its ranks
            os.kill(agent, signal.SIGINT)
            time.sleep(1)
            os.kill(agent, signal.SIGINT)
        case _:
            who, _, name = way.rpartition(" ")
            os.kill(agent if who else driver, getattr(signal, f"SIG{name}"))


def ids(started: StartedJob, kind: str, field: str) -> set[Any]:
    return {event[field] for event in started.events() if event["kind"] == kind}


def is_in(started: StartedJob, moment: str) -> bool:
    """Whether the job is in that part of a step now, by its own account."""
    match moment:
        case "generate":
            return bool(ids(started, "group_running", "group_id") - ids(started, "group_finished", "group_id"))
        case "train":
            delivered = {rollout + 1 for rollout in ids(started, "groups_delivered", "rollout_id")}
            return bool(delivered - ids(started, "trainer_stepped", "step"))
        case _:
            trained = {f"0.{step}" for step in ids(started, "trainer_stepped", "step")}
            return bool(trained - ids(started, "weights_published", "version"))


def reach(started: StartedJob, moment: str) -> None:
    started.wait_for_event("process_spawned", 60, name="engine-0")
    if moment.startswith("start"):
        time.sleep(float(moment.split("+")[1]))
        started.note_ports()
        return
    started.wait_for_event("weights_published", 240)
    started.note_ports()
    if moment == "update":  # it takes milliseconds, or for ever when the engine's scheduler stands still
        started.wait_for("training", lambda: is_in(started, "train"), 240)
        [scheduler] = [member for member in started.members() if "sglang::schedul" in member.name()]
        scheduler.suspend()
    started.wait_for(moment, lambda: is_in(started, moment), 240)


def assert_it_ends(tmp_path: Path, model: Path, way: str, moment: str, ranks: int = 1) -> None:
    recipe = write_recipe(tmp_path, model, steps=100_000)
    with job(recipe, *SLOW.get(moment, ()), torchrun=ranks) as started:
        reach(started, moment)
        assert moment.startswith("start") or is_in(started, moment), "the moment has passed"
        end(started, way)
        started.assert_nothing_is_left(LIMIT_S)
        assert started.process.wait(timeout=5) != 0


@pytest.mark.parametrize(("way", "moment"), [("KILL", "start+2"), ("agent TERM", "start+2")])
def test_nothing_outlives_the_job(tmp_path: Path, tiny_models: tuple[Path, Path], way: str, moment: str) -> None:
    assert_it_ends(tmp_path, tiny_models[0], way, moment)


def test_a_job_survives_the_death_of_its_only_engine_and_neither_life_of_that_outlives_ctrl_c(
    tmp_path: Path, tiny_models: tuple[Path, Path]
) -> None:
    recipe = write_recipe(tmp_path, tiny_models[0], steps=100_000)
    options = ("--rollout.max-new-tokens", "200", "--rollout.ignore-eos")  # 2 s, so that signals land in it
    with job(recipe, *options, torchrun=1) as started:
        started.wait_for_event("groups_trained", 240)
        started.note_ports()
        [engine] = [e for e in started.events() if e["kind"] == "process_spawned" and e["name"] == "engine-0"]
        os.kill(engine["pid"], signal.SIGKILL)
        # The one that was on its way may have been finished before.
        started.wait_for("steps with the new engine", lambda: len(ids(started, "trainer_stepped", "step")) >= 4, 240)
        started.wait_for("generation", lambda: is_in(started, "generate"), 60)
        started.note_ports()
        end(started, "Ctrl-C twice")
        started.assert_nothing_is_left(LIMIT_S)
        assert started.process.wait(timeout=5) != 0
    events = started.events()
    assert [event["kind"] for event in events].count("process_restarting") == 1
    trained = [event["group_ids"] for event in events if event["kind"] == "groups_trained"]
    assert len({group for groups in trained for group in groups}) == 4 * len(trained) >= 12
    # Either it loaded what was published, or the next publication found it waiting.
    back = [e for e in events if e["kind"] == "engine_state" and e["generation"] == 1 and e["state"] == "serving"]
    assert back and back[0]["version"] is not None


@pytest.mark.long
@pytest.mark.parametrize("moment", ["start+2", "start+6", "start+12", "generate", "train", "update"])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_outlives_the_job_whatever_ends_it(
    tmp_path: Path, tiny_models: tuple[Path, Path], way: str, moment: str
) -> None:
    assert_it_ends(tmp_path, tiny_models[0], way, moment)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["start+6", "train", "update"])
@pytest.mark.parametrize("way", ["INT", "KILL", "agent TERM", "agent KILL", "Ctrl-C twice"])
def test_nothing_outlives_a_job_of_two_ranks(
    tmp_path: Path, tiny_models: tuple[Path, Path], way: str, moment: str
) -> None:
    assert_it_ends(tmp_path, tiny_models[0], way, moment, ranks=2)
