"""A whole job that may be killed at any moment: a real loop, executor and run directory, a trainer that only counts.

Runs in a process of its own; engine and trainer are in it too, so that one SIGKILL ends everything.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread

from asyncrl import components
from asyncrl.components import RolloutComponents
from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.staleness import Bound
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.observability.events import Event, EventLog
from asyncrl.rollout.executor import RolloutExecutor
from asyncrl.run.pauses import Pauses
from asyncrl.run_directory import RunDirectory
from asyncrl.training.checkpoints.manifest import SavedLayout
from asyncrl.training.checkpoints.saver import Written
from asyncrl.training.checkpoints.store import CheckpointStore, SavedCheckpoint
from tests.loops import load_loop
from tests.run.jobs import a_job
from tests.scripted.answers import Action, AnsweringEngine, scripted_engine


class Deadly(EventLog):
    """Kills the process some seconds after an event with the given number."""

    def __init__(self, run: RunDirectory, kill: tuple[int, float] | None) -> None:
        super().__init__(run.events, run.attempt)
        self._left, self._after_s = kill or (-1, 0.0)

    def emit(self, event: Event) -> None:
        super().emit(event)
        self._left -= 1
        if self._left == 0:
            threading.Timer(self._after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


class CountingTrainer:
    """Checks each batch against the bound, and saves how many it has had."""

    def __init__(self, config: Config, run: RunDirectory, engine: AnsweringEngine, pauses: Pauses) -> None:
        self.resumed: SavedCheckpoint | None = None
        self._bound = Bound.of(config)
        self._run, self._engine, self._pauses = run, engine, pauses
        self._store = CheckpointStore(run.path / "checkpoints")
        self._step = 0
        self._saved: Written | None = None

    async def init(self, *, threads: int | None = None) -> int:
        self._store.tidy()
        self.resumed = self._store.newest()
        self._step = 0 if self.resumed is None else self.resumed.step
        return self._step

    async def train(self, rollout_id: int, batch: RolloutBatch) -> dict[str, float]:
        assert rollout_id == self._step
        self._bound.check(batch)
        await anyio.sleep(0.02)  # when it is saved, some groups of the next batch are finished, others are not
        self._step += 1
        return {}

    async def update_weights(self, rollout_id: int | None = None) -> Any:
        async with self._pauses.update(requests_end=True):
            self._engine.version = f"{self._run.attempt}.{self._step}"
            self._pauses.serve(self._engine.version)
        return SimpleNamespace(version=self._engine.version)

    async def save_checkpoint(self, rollout_id: int, extra: dict[str, bytes], *, wait: bool) -> None:
        staging = self._store.staging(self._step, 1)
        staging.mkdir(parents=True)
        publish = partial(self._store.publish, staging, {}, step=rollout_id + 1, attempt=self._run.attempt, roles={})
        await anyio.to_thread.run_sync(lambda: publish(layout=SavedLayout(1, 1), extra=extra, config=""))
        self._saved = Written(rollout_id + 1, 0.0)

    def statistics(self) -> Any:
        return SimpleNamespace(step=self._step, checkpoint=self._saved, saving=None)


class Controller:
    """Engines that are always there."""

    async def wait_ready(self) -> None: ...

    async def prepare_rollout(self, rollout_id: int) -> None: ...

    async def wait_publication_needed(self) -> None:
        await anyio.sleep_forever()

    def fleet(self) -> Any:
        return SimpleNamespace(serves=True)


def run_job(config: dict[str, Any], entrypoint: str, kill: tuple[int, float] | None) -> None:
    """Runs the loop of `entrypoint` to its end, or until `kill`: (number of an event, seconds after it)."""
    anyio.run(_run, Config.model_validate(config), entrypoint, kill)


async def _run(config: Config, entrypoint: str, kill: tuple[int, float] | None) -> None:
    loop = load_loop(entrypoint)
    dice = random.Random()

    def answer(request: dict[str, Any], number: int) -> Action:
        return Action(latency_s=dice.uniform(0.001, 0.03))

    with RunDirectory.open(config) as run:
        events = Deadly(run, kill)
        async with scripted_engine(answer) as engine, anyio.create_task_group() as tasks:
            executor = RolloutExecutor(
                config,
                router_url=engine.url,
                host=None,
                events=events,
                tokenizer=PolicyTokenizer.load(config.model.path),
                log_dir=run.logs,
            )
            await executor.start(tasks)

            async def create_rollout_components(job: Any, **how: Any) -> Any:
                return RolloutComponents(Controller(), executor, executor.get_num_rollout_per_epoch())  # type: ignore[arg-type]

            async def create_train_group(job: Any, components: Any) -> Any:
                return CountingTrainer(config, run, engine, job.pauses)

            components.create_rollout_components = create_rollout_components
            components.create_train_group = create_train_group
            job = a_job(tasks, config=config)
            job.events, job.directory = events, run
            await loop.train(job)
            await job.disposal.aclose()
            await executor.dispose()
