"""A rank of a whole job: everything is real but the engines, their router, and what the trainer computes.

Under torchrun: `gang_rank.py @ recipe.toml`. Rank 1 kills itself in the fifth step of the first attempt. With
STOP_IN_A_STEP in the environment, rank 0 gets a SIGTERM in the midst of its third step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

import asyncrl.driver
from asyncrl.training.backends import BACKENDS
from tests.loops import load_loop
from tests.scripted import Latency, ScriptedEngine, ScriptedHost, ScriptedRouter
from tests.training.worlds import SPECS, ScriptedBackend

STEPS_BEFORE_DEATH = 4
STEPS_BEFORE_STOP = 2


def die_in_the_fifth_step(steps: list[None] = []) -> None:  # noqa: B006 - counts the calls of this process
    steps.append(None)
    if len(steps) > STEPS_BEFORE_DEATH and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        checkpoints = Path(sys.argv[sys.argv.index("@") + 1]).parent / "run" / "checkpoints"
        while not list(checkpoints.glob("step-*/manifest.json")):  # written beside the training, by other threads
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


def stop_in_the_third_step(steps: list[None] = []) -> None:  # noqa: B006 - likewise
    steps.append(None)
    if len(steps) == STEPS_BEFORE_STOP + 1 and "STOP_IN_A_STEP" in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)


@asynccontextmanager
async def scripted_host(logs: Path, *_: object) -> AsyncIterator[ScriptedHost]:
    tensors = {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in SPECS}
    engines = {
        f"engine-{i}": ScriptedEngine(tensors, latency=Latency(token_s=0.002, mean_tokens=6), vocab_size=64)
        for i in range(2)
    }
    async with ScriptedHost(engines, ScriptedRouter()) as host:
        yield host


def main() -> int:
    asyncrl.driver.EngineHost = SimpleNamespace(start=scripted_host)  # type: ignore[assignment,misc]
    faults = {(1, "forward_backward"): die_in_the_fifth_step, (0, "forward_backward"): stop_in_the_third_step}
    BACKENDS["megatron"] = replace(BACKENDS["megatron"], make=partial(ScriptedBackend, faults=faults))
    return asyncrl.driver.run_job(load_loop("train_async").train)


if __name__ == "__main__":
    sys.exit(main())
