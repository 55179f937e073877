"""How many threads a job computes with on CPU, and whose OMP_NUM_THREADS it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.config.layout import Threads
from asyncrl.config.machine import Machine, omp_threads_of_user
from asyncrl.config.placement.rules import plan_layout
from asyncrl.config.placement.threads import threads_on_cpu

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("cores", "ranks", "engine_ranks", "trainer", "engine"),
    [  # each: while the other stands still, and while both compute
        (2, 1, 1, (2, 1), (2, 1)),
        (16, 1, 1, (16, 12), (4, 4)),
        (16, 4, 2, (4, 2), (4, 4)),
        (2, 2, 1, (1, 1), (2, 1)),
        (2, 1, 2, (2, 1), (1, 1)),
        (1, 1, 3, (1, 1), (1, 1)),
        (4, 1, 0, (4, 4), (4, 2)),
    ],
)
def test_trainer_and_engines_share_the_cores_only_while_both_compute(
    cores: int, ranks: int, engine_ranks: int, trainer: tuple[int, int], engine: tuple[int, int]
) -> None:
    machine = Machine(world_size=ranks, local_world_size=ranks, cpus=tuple(range(cores)))
    threads = threads_on_cpu(machine, engine_ranks)
    assert (threads.trainer, threads.trainer_beside_engines) == trainer
    assert (threads.engine, threads.engine_beside_trainer) == engine


@given(st.integers(1, 64), st.integers(1, 8), st.integers(0, 8))
def test_no_more_threads_compute_than_there_are_cores(cores: int, ranks: int, engine_ranks: int) -> None:
    threads = threads_on_cpu(Machine(ranks, ranks, cpus=tuple(range(cores))), engine_ranks)
    if cores >= ranks:
        assert threads.trainer * ranks <= cores
    if cores >= engine_ranks:
        assert threads.engine * engine_ranks <= cores
    if cores >= ranks + engine_ranks:
        both = threads.trainer_beside_engines * ranks + threads.engine_beside_trainer * engine_ranks
        assert both <= cores


def test_the_users_own_setting_holds_for_trainer_and_engines() -> None:
    machine = Machine(cpus=tuple(range(16)), omp_threads=3)
    assert threads_on_cpu(machine, 2) == Threads(3, 3, 3, 3, 3)


def test_engines_of_another_model_leave_cores_at_any_time() -> None:
    machine = Machine(cpus=tuple(range(4)))
    config = Config.model_validate({"engine": {"num_engines": 1}, "models": {"judge": {"path": "judge"}}})
    layout = plan_layout(config, machine)
    (judge,) = layout.beside["judge"].engines
    of_the_policy = [layout.engine_threads("engine-0", overlaps=overlaps) for overlaps in (False, True)]
    of_the_judge = [layout.engine_threads(judge.engine_id, overlaps=overlaps) for overlaps in (False, True)]
    assert (of_the_policy, of_the_judge) == ([4, 2], [2, 2])
    assert layout.engine_threads("engine-0", overlaps=False, small=True) == 1


@pytest.mark.parametrize(
    ("environ", "of_agent", "expected"),
    [
        ({}, {}, None),
        ({"OMP_NUM_THREADS": "4"}, {}, 4),
        ({"OMP_NUM_THREADS": "1"}, {}, 1),  # without torchrun
        (TORCHRUN | {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"}, {}, 1),  # torchrun sets nothing for one rank
        (TORCHRUN | {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, {}, None),  # torchrun's
        (TORCHRUN | {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, {"OMP_NUM_THREADS": "1"}, 1),
        (TORCHRUN | {"OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "2"}, {}, 3),
        ({"OMP_NUM_THREADS": "4,2"}, {}, 4),  # the outer level of nested regions
        ({"OMP_NUM_THREADS": "many"}, {}, None),  # OpenMP ignores it too
        ({"OMP_NUM_THREADS": "0"}, {}, None),
    ],
)
def test_what_torchrun_sets_is_not_the_users(
    environ: dict[str, str], of_agent: dict[str, str], expected: int | None
) -> None:
    assert omp_threads_of_user(environ, lambda: of_agent) == expected


def test_the_environment_of_torchrun_itself_is_read_as_it_was_started() -> None:
    code = "from asyncrl.config.machine import environment_of_agent as e; print(e().get('OMP_NUM_THREADS'))"
    parent = (
        "import os, subprocess, sys; os.environ['OMP_NUM_THREADS'] = '1'; "
        "sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"
    )
    root = str(Path(__file__).parents[2])
    for setting, expected in (({}, "None"), ({"OMP_NUM_THREADS": "7"}, "7")):
        environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | setting | {"PYTHONPATH": root}
        done = subprocess.run([sys.executable, "-c", parent, code], env=environ, capture_output=True, text=True)
        assert done.stdout.strip() == expected, done.stderr
