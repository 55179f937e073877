"""A job and its parts for tests of loops: the parts note what is asked of them, and do no more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import anyio

from asyncrl.components import RolloutComponents, Run
from asyncrl.config import Config
from asyncrl.exit_protocol import StopRequest
from asyncrl.rollout.evaluation import skipped_report
from asyncrl.run.pauses import Pauses
from asyncrl.run.turns import make_turns
from asyncrl.tasks import Background
from asyncrl.training.checkpoints.saver import Written
from asyncrl.training.ranks.trainer_thread import TrainerThreadStatistics
from asyncrl.training.statistics import TrainGroupStatistics


class Noted:
    """Answers every method; `calls` holds what was asked, of all parts in order: `executor.get 3 trainer`."""

    def __init__(self, name: str, calls: list[str], **answers: Any) -> None:
        self._name, self._calls, self._answers = name, calls, answers

    def note(self, method: str, *args: Any, **how: Any) -> None:
        told = [*(str(arg) for arg in args if arg is not None), *(key for key, value in how.items() if value)]
        self._calls.append(" ".join([f"{self._name}.{method}", *told]))

    def __getattr__(self, method: str) -> Any:
        def note(*args: Any, **how: Any) -> None:
            self.note(method, *args, **how)

        async def call(*args: Any, **how: Any) -> Any:
            note(*args, **how)
            answer = self._answers.get(method)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


class Engines(Noted):
    """Engines that serve and never lose anything."""

    def __init__(self, calls: list[str], **answers: Any) -> None:
        super().__init__("engines", calls, **answers)

    def fleet(self) -> Any:
        return SimpleNamespace(serves=True, needs_publication=False)

    async def wait_publication_needed(self) -> None:
        await anyio.sleep_forever()


class Executor(Noted):
    """An executor whose batches are `BATCH`."""

    last_rollout = None
    name = ""

    def __init__(self, calls: list[str], **answers: Any) -> None:
        super().__init__("executor", calls, **({"get": "BATCH", "save": {}} | answers))

    async def restore(self, files: Any, step: int, on_reached: Any) -> Any:
        self.note("restore", files, step)
        reached = self._answers.get("restore")
        await on_reached(reached)
        return reached

    async def eval(self, step: int, hf_dir: Any = None) -> Any:
        self.note("eval", step, hf_dir)
        answer = self._answers.get("eval", skipped_report(step, "nothing is asked"))
        return await answer(step) if callable(answer) else answer

    def report_eval_skip(self, step: int, reason: str) -> Any:
        self.note("report_eval_skip", step)
        return skipped_report(step, reason)

    def __getattr__(self, method: str) -> Any:
        if method in ("engines_paused", "engines_resumed", "set_weight_version", "generate_ahead"):
            return lambda *args: self.note(method, *args)
        if method == "settle":
            return lambda *args: self.note(method, *args)
        if method == "updating":
            return self._updating
        return super().__getattr__(method)

    @asynccontextmanager
    async def _updating(self) -> AsyncIterator[None]:
        self.note("updating")
        yield
        self.note("updating ended")


class Trainer(Noted):
    """A trainer that counts its steps; a checkpoint is written at once unless it was told to be `saving` one."""

    def __init__(self, calls: list[str], step: int = 0, *, resumed_at: int | None = None, **answers: Any) -> None:
        super().__init__("trainer", calls, **({"save_checkpoint": "PATH"} | answers))
        self.step = step
        self.newest: Written | None = None
        self.saving: int | None = None
        self.failure: str | None = None
        self.running: str | None = None
        self.threads: int | None = None
        resumed = SimpleNamespace(step=resumed_at, path="PATH", extra={}, other_layout="")
        self.resumed: Any = None if resumed_at is None else resumed

    async def init(self, *, threads: int | None = None) -> int:
        self.note("init")
        self.threads = threads
        return 0 if self.resumed is None else int(self.resumed.step)

    async def train(self, rollout_id: int, batch: Any) -> dict[str, float]:
        self.note("train", rollout_id)
        self.step = rollout_id + 1
        return dict(self._answers.get("train") or {})

    async def train_sft(self, rollout_id: int | None, batch: Any, lr: float) -> dict[str, float]:
        self.note("train_sft", rollout_id, batch, lr)
        if rollout_id is not None:
            self.step = rollout_id + 1
        return {"train/loss": 0.5}

    async def save_checkpoint(self, rollout_id: int, extra: dict[str, bytes], *, wait: bool = False) -> Any:
        self.note("save_checkpoint", rollout_id, extra, wait=wait)
        if self._answers["save_checkpoint"] is not None:
            self.newest = Written(rollout_id + 1, 0.5)
        return self._answers["save_checkpoint"]

    def statistics(self) -> TrainGroupStatistics:
        thread = TrainerThreadStatistics(self.running, 0.0, 0)
        return TrainGroupStatistics(thread, self.step, self.failure, self.newest, self.saving)


class Record:
    """The account of a run, in lists."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.points: list[tuple[Any, ...]] = []
        self.recorded: list[tuple[Any, ...]] = []
        self.started: tuple[int, int] | None = None
        self.exports: list[Any] = []

    def phase(self, name: str) -> Any:
        return nullcontext()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def continue_after(self, step: int) -> None:
        pass

    def start(self, num_steps: int, first: int) -> None:
        self.started = num_steps, first

    def step(self, *step: Any) -> None:
        self.recorded.append(step)

    def evaluated(self, *point: Any) -> None:
        self.points.append(point)

    def exported(self, directory: Any) -> None:
        self.exports.append(directory)


def a_job(tasks: Any = None, *, colocated: bool = False, config: Config | None = None, **sections: Any) -> Any:
    """A job without processes; `sections` are of its configuration. Its background work lives in `tasks`."""
    config = config or Config.model_validate(sections)
    layout = SimpleNamespace(
        colocated=colocated, dtype="float32", trainer_threads=lambda *, overlaps: 1 if overlaps else 2
    )
    record, pauses = Record(), Pauses()
    return SimpleNamespace(
        config=config,
        layout=layout,
        directory=SimpleNamespace(
            export="DIR",
            attempt=0,
            events=None,
            weight_version=lambda step: f"0.{step}",
            let_former_go=lambda: False,
        ),
        events=SimpleNamespace(emit=lambda event: None),
        record=record,
        stop=StopRequest(),
        task_group=tasks,
        background=Background(tasks),
        pauses=pauses,
        turns=make_turns(layout, config, pauses, record.note),  # type: ignore[arg-type]
        disposal=AsyncExitStack(),
        on_stop_now=[],
    )


@asynccontextmanager
async def started(
    engines: Any, executor: Any, trainer: Any, *, job: Any = None, per_epoch: int | None = None, **how: Any
) -> AsyncIterator[Run]:
    """A run over these parts that has started; ends its background work."""
    async with anyio.create_task_group() as tasks:
        job = job or a_job()
        job.task_group, job.background = tasks, Background(tasks)
        yield await Run.start(job, RolloutComponents(engines, executor, per_epoch), trainer, **how)
        tasks.cancel_scope.cancel()
