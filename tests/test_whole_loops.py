"""The loops over a real controller, publication and executor: what updates of the weights and a resume cost.

Engines and their router are scripted. The trainer takes no time and checks what it is given; its weights are told apart
by their version.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncrl import components
from asyncrl.components import RolloutComponents
from asyncrl.config import Config
from asyncrl.data.batch import RolloutBatch
from asyncrl.data.staleness import Bound, step_of
from asyncrl.observability.events import EventLog
from asyncrl.rollout.executor import RolloutExecutor
from asyncrl.weights.publication import PublicationReport
from tests.inference.conftest import StartFleet, cpu_layout, eventually, start_fleet
from tests.inference.test_models import beside
from tests.inference.transaction_rig import Rig, holds, rig, tensors_of
from tests.loops import load_loop
from tests.rollout.conftest import StartExecutor, anyio_backend, prompts, start_executor, tokenizer
from tests.run.jobs import a_job
from tests.scripted import Latency, ScriptedEngine, ScriptedRouter
from tests.told import Told

pytestmark = pytest.mark.anyio
__all__ = ["anyio_backend", "prompts", "start_executor", "start_fleet", "tokenizer"]  # fixtures

GROUPS, SAMPLES = 3, 4
"""Of a batch, and of a group, as the executor of `start_executor` has them."""
Sections = dict[str, dict[str, Any]]


@pytest.fixture
def events(tmp_path: Path) -> EventLog:
    return EventLog(tmp_path / "events.jsonl")


class Trainer:
    def __init__(
        self, rig: Rig, executor: RolloutExecutor, config: Config, attempt: int, first: int, resumed: Any
    ) -> None:
        self.rig, self.executor = rig, executor
        self.attempt, self.step, self.resumed = attempt, first, resumed
        self.bound = Bound.of(config)
        self.batches: list[RolloutBatch] = []
        self.under_way: list[int] = []
        """Samples that were being generated, as each batch was trained."""
        self.saved: dict[int, Mapping[str, bytes]] = {}
        """The executor's part of each checkpoint, by step."""

    async def init(self, *, threads: int | None = None) -> int:
        return self.step

    async def train(self, rollout_id: int, batch: RolloutBatch) -> dict[str, float]:
        assert rollout_id == self.step
        self.bound.check(batch)
        self.batches.append(batch)
        self.under_way.append(self.executor.statistics().client.in_flight)
        self.step += 1
        return {}

    async def update_weights(self, rollout_id: int | None = None) -> PublicationReport:
        """Waits until a request is half done, if one is in flight: on a busy machine all could just begin or end."""
        generations = [engine.generation for engine in self.rig.fleet.engines]
        await eventually(
            lambda: any(g.half_done for g in generations) or not self.executor.statistics().client.in_flight
        )
        return await self.rig.publish(f"{self.attempt}.{self.step}")

    async def save_checkpoint(self, rollout_id: int, extra: Mapping[str, bytes], *, wait: bool) -> None:
        self.saved[self.step] = extra

    def statistics(self) -> Any:
        return SimpleNamespace(step=self.step, checkpoint=SimpleNamespace(step=self.step), saving=None)


class Life:
    """One attempt of a job."""

    def __init__(self, rig: Rig, executor: RolloutExecutor, trainer: Trainer, evaluator: ScriptedEngine) -> None:
        self.rig, self.executor, self.trainer = rig, executor, trainer
        self.evaluated: list[tuple[int, str | None, bool]] = []
        """(step, why it was skipped, whether all engines held the weights of that step)."""
        self.points: list[tuple[int, str | None, Mapping[str, float]]] = []
        self.evaluator = evaluator
        """The engine that only evaluates, where there is one."""

    def note_evaluation(
        self, step: int, accuracy: float | None, figures: Mapping[str, float], skipped: str | None
    ) -> None:
        self.points.append((step, skipped, figures))
        weights = tensors_of(f"{self.trainer.attempt}.{step}")
        self.evaluated.append((step, skipped, all(holds(engine, weights) for engine in self.rig.fleet.engines)))

    async def run(self, entrypoint: str, config: Config, events: EventLog, log: Path) -> None:
        loop, trainer = load_loop(entrypoint), self.trainer

        async def create_rollout_components(job: Any, **how: Any) -> RolloutComponents:
            return RolloutComponents(self.rig.fleet.controller, self.executor, None)

        async def create_train_group(job: Any, components: RolloutComponents) -> Trainer:
            return trainer

        async with anyio.create_task_group() as tasks:
            job = a_job(tasks, config=config)
            job.record.evaluated = self.note_evaluation
            job.directory = SimpleNamespace(attempt=trainer.attempt, events=log, let_former_go=lambda: False)
            job.events, self.rig.pauses = events, job.pauses
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(components, "create_rollout_components", create_rollout_components)
                patch.setattr(components, "create_train_group", create_train_group)
                await loop.train(job)
            tasks.cancel_scope.cancel()
        assert self.rig.complaints() == []

    def makers(self) -> dict[str, list[str]]:
        """Sample id → the weights that really made each token, in all its attempts, as the engines know it."""
        made = [item for engine in self.rig.fleet.engines for item in engine.generation.makers.items()]
        by_id = {rid.partition("-")[2]: versions for rid, versions in made}
        makers: dict[str, list[str]] = {}
        for rid in sorted(by_id):
            makers.setdefault(rid.rpartition(".")[0], []).extend(by_id[rid])
        return makers


@pytest.fixture
def live(start_fleet: StartFleet, start_executor: StartExecutor, events: EventLog, tmp_path: Path) -> Any:
    """Runs a whole attempt with these sections of the configuration, and yields what it left, its engines alive."""

    @asynccontextmanager
    async def live(
        entrypoint: str,
        sections: Sections,
        *,
        attempt: int = 0,
        first: int = 0,
        resumed: Any = None,
        evaluates: Latency | None = None,
    ) -> AsyncIterator[Life]:
        sections = sections | {"run": {"export": False}}
        config = Config.model_validate(sections)
        latency = Latency(token_s=0.004)
        how: dict[str, Any] = {"vocab_size": 64, "on_update": config.weights.on_update}
        evaluator = ScriptedEngine(tensors_of("base"))
        if evaluates is not None:
            evaluator.latency, evaluator.vocab_size = evaluates, 64
            layout = replace(cpu_layout(2), beside={"eval": beside("eval", 1)})
            servers = {"eval-0": evaluator, "router-eval": ScriptedRouter()}
            how |= {"layout": layout, "servers": servers, "copies": tmp_path / "copies", "eval": {"fleet": {}}}
        async with (
            rig(start_fleet, latency=latency, **how) as r,
            start_executor(
                SimpleNamespace(url=r.fleet.controller.router_url),
                pin_eval_fleet=r.fleet.controller.pin_eval_fleet,
                **sections,
            ) as executor,
        ):
            life = Life(r, executor, Trainer(r, executor, config, attempt, first, resumed), evaluator)
            await life.run(entrypoint, config, events, tmp_path / "events.jsonl")
            yield life

    return live


def all_once(steps: int) -> dict[str, int]:
    return {f"{ordinal:08d}": 1 for ordinal in range(steps * GROUPS)}


@pytest.mark.parametrize(
    ("on_update", "lives_through"), [("retract", True), ("in_place", True), ("wait", False), ("abort", True)]
)
async def test_weights_that_change_in_the_midst_of_generation_cost_no_sample_and_no_token_trains_beyond_the_bound(
    live: Any, events: EventLog, on_update: str, lives_through: bool
) -> None:
    steps, max_staleness = 4, 1
    sections: Sections = {
        "rollout": {
            "max_staleness": max_staleness,
            "concurrency": 8,  # a batch takes a round and a half: the next one is always under way
            "max_new_tokens": 30,
            "request_retries": 0,
        },
        "weights": {"on_update": on_update},
        "train": {"num_steps": steps},
    }
    async with live("train_async", sections) as life:
        trainer, makers, client = life.trainer, life.makers(), life.executor.statistics().client

    assert len(trainer.under_way) == steps and all(trainer.under_way[:-1]), "an update met no request"
    assert client.failed == 0 and set(client.failed_attempts) == ({"aborted"} if on_update == "abort" else set())
    assert Counter(group for batch in trainer.batches for group in batch.group_ids) == all_once(steps)
    assert [batch.num_samples for batch in trainer.batches] == [GROUPS * SAMPLES] * steps
    admitted = Counter(line["group_id"] for line in events.recent if line["kind"] == "group_admitted")
    assert admitted == all_once(steps), "a group too many was begun"

    trained = {sample_id for batch in trainer.batches for sample_id in batch.sample_ids}
    assert any(len(set(makers[sample_id])) > 1 for sample_id in trained) is lives_through
    for batch in trainer.batches:
        assert batch.sample_index.tolist() == list(range(batch.num_samples)), "each sample is one sequence"
        for sample_id, spans in zip(batch.sample_ids, batch.versions, strict=True):
            told = [step_of(span.version) or 0 for span in spans for _ in range(span.start, span.end)]
            true = [step_of(version) or 0 for version in makers[sample_id]]
            assert batch.rollout_id - max_staleness <= min(true) <= max(true) <= batch.rollout_id
            assert all(a <= b for a, b in zip(told, true, strict=True)), "a token counts with weights that came later"
            assert told == true or on_update == "in_place"


@pytest.mark.parametrize("entrypoint", ["train", "train_async"])
async def test_engines_of_their_own_evaluate_while_the_loop_trains_and_publishes(
    live: Any, tmp_path: Path, entrypoint: str
) -> None:
    """Its start, its checkpoint and its samples: no step waits for any of them, and each point is of one version."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"{i}-1=", "answer": "no"}) + "\n" for i in range(5)))
    sections: Sections = {
        "rollout": {"max_staleness": int(entrypoint == "train_async")},
        "train": {"num_steps": 6},
        "eval": {"data": {"source": str(held_out)}, "every": 1, "fleet": {}, "if_busy": "skip"},
    }
    async with live(entrypoint, sections, evaluates=Latency(token_s=0.1)) as life:
        points, makers = life.points, life.evaluator.generation.makers
    done = {step: figures for step, skipped, figures in points if skipped is None}
    busy = [skipped for _, skipped, _ in points if skipped is not None]
    assert done.keys() >= {0, 6} and len(done) + len(busy) == 7, "each has its point, the first and the last a result"
    assert busy and all("is still under way (eval.if_busy)" in reason for reason in busy)
    assert done[0]["eval/lag_steps"] > 0 and done[6]["eval/lag_steps"] == 0
    for step, figures in done.items():
        evaluated = int(figures["eval/weights_step"])
        assert evaluated >= step, "where the disk stood still, newer weights overtake a copy"
        of_step = {rid: made for rid, made in makers.items() if f"-e{step:07d}." in rid}
        assert len(of_step) == 5 and {version for made in of_step.values() for version in made} == {f"0.{evaluated}"}


@pytest.mark.parametrize("entrypoint", ["train", "train_async"])
async def test_an_evaluation_right_after_a_resume_asks_the_resumed_weights_and_moves_no_prompt(
    live: Any, events: EventLog, tmp_path: Path, entrypoint: str
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"{i}-1=", "answer": "no"}) + "\n" for i in range(5)))
    sections: Sections = {"rollout": {"max_staleness": int(entrypoint == "train_async")}, "checkpoint": {"every": 2}}
    async with live(entrypoint, sections | {"train": {"num_steps": 4}}) as killed:
        [resumed, _] = (
            SimpleNamespace(extra=extra, path="there", step=step, other_layout="")
            for step, extra in killed.trainer.saved.items()
        )
    before = len(events.recent)

    sections |= {"train": {"num_steps": 6}, "eval": {"data": {"source": str(held_out)}, "every": 1}}
    async with live(entrypoint, sections, attempt=1, first=2, resumed=resumed) as life:
        evaluated, makers = life.evaluated, life.makers()
    assert evaluated == [(step, None, True) for step in range(2, 7)]
    for step in range(2, 7):
        made_by = [set(versions) for sample_id, versions in makers.items() if sample_id.startswith(f"e{step:07d}")]
        assert made_by == [{f"1.{step}"}] * 5
    kinds = [line["kind"] for line in events.recent[before:]]
    assert kinds.index("evaluated") < kinds.index("group_admitted"), "it came first"

    told = Told(tmp_path / "events.jsonl")  # a group has the same prompt in both attempts, else it says so
    assert sorted(told.trained) == list(range(6)) and told.groups == all_once(6)
    assert told.rolled_back == 2 * GROUPS
