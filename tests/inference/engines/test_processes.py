"""The ends of processes that the host does not know are noticed at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import anyio
import pytest

from asyncrl.inference.engines.processes import first_end

pytestmark = pytest.mark.anyio


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


async def test_the_first_process_that_ends_is_told_and_one_that_is_gone_counts(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    lives, ends = (process.pid for process in sleepers)
    with anyio.move_on_after(0.2) as scope:
        await first_end({lives: "scheduler", ends: "detokenizer"})
    assert scope.cancelled_caught
    sleepers[1].kill()
    with anyio.fail_after(20):
        for _ in range(2):
            assert await first_end({lives: "scheduler", ends: "detokenizer"}) == f"detokenizer (pid {ends})"
            sleepers[1].wait()


async def test_without_processes_none_ends() -> None:
    with anyio.move_on_after(0.05) as scope:
        await first_end({})
    assert scope.cancelled_caught
