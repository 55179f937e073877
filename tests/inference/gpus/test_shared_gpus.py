"""Turns on the GPUs that engines share with the trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asyncrl.data.fleet import EngineState
from asyncrl.inference.gpus.shared_gpus import SharedGpus

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("turns", range(8))
async def test_an_engine_learns_of_the_end_of_a_turn_however_soon_after_its_look_that_comes(turns: int) -> None:
    gpus = SharedGpus(step_timeout_s=1.0)
    gpus.give_up(["weights"])
    engine: Any = SimpleNamespace(
        endpoint=SimpleNamespace(colocated=True), state=EngineState.DEAD, engine_id="engine-0"
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gpus.wait_turn, engine, anyio.Event())
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        gpus.take_back(["weights"])
