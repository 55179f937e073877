"""The whole turn on shared GPUs in miniature: two trainer ranks in processes of their own, and engines on "their GPUs".

Engines leave, the trainer comes back, trains, publishes in place and leaves, engines come back and generate. All is the
product's own (turns, controller, publisher, handover, rank link, host memory) but the model and the engines' insides.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.config.layout import EnginePlacement, ProcessLayout, TrainerPlacement
from asyncrl.data.batch import RolloutBatch
from asyncrl.errors import TrainerError
from asyncrl.inference.engines import restarts
from asyncrl.inference.sglang import engine_api
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import WAITS, waiting
from asyncrl.run.pauses import Pauses, ToldFleet
from asyncrl.run.turns import Halves, make_turns
from asyncrl.training.learner.step_loss import StepLoss
from asyncrl.training.learner.tally import Tally
from asyncrl.training.megatron.host_memory import HostMemory
from asyncrl.training.ranks import ranks
from asyncrl.training.train_group import TrainGroup
from asyncrl.weights.buckets import TensorSpec
from asyncrl.weights.publication import PublicationLimits, PublicationReport
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.transports.tensor import TensorTransport
from tests.inference.conftest import Fleet, eventually, fleet_of
from tests.scripted import die, hang, instead, refuse
from tests.training import worlds
from tests.training.worlds import Faults, ScriptedBackend, make_batch, run_world
from tests.weights.fakes import specs_of

LAYOUTS = {"two engines of one rank": ((0,), (1,)), "one engine of two ranks": ((1, 0),)}
BUCKET_BYTES = 4096
PATIENT_S, HURRIED_S = 20.0, 1.0
"""Deadline of a call that is to be answered, and of one that is not."""
BOUND_S = 30.0
"""For a step of a turn in which something hangs, with all the deadlines of its waits; and for a slow machine."""


def weights() -> dict[str, Tensor]:
    """Three buckets."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(600, generator=generator) for name in ("first", "second", "third", "fourth")}


@dataclass
class SharingBackend(ScriptedBackend):
    """Tensors of its own on a device that it leaves and comes back to; a step adds one to each weight."""

    weights: dict[str, Tensor] = field(default_factory=weights)
    moment: Tensor = field(default_factory=lambda: torch.full((5000,), 2.0))

    def __post_init__(self) -> None:
        self.host = HostMemory(torch.device("cpu"))

    def forward_backward(self, batch: RolloutBatch, micro_batches: Any, loss: StepLoss) -> Tally:
        assert float(self.moment.sum()) == 10_000.0, "the trainer computes with what is not there"
        return super().forward_backward(batch, micro_batches, loss)

    def step(self, lr: float, grad_norm: float) -> None:
        self._together("step")
        for tensor in self.weights.values():
            tensor += 1.0

    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        return specs_of(self.weights)

    def export_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.items():
            self._together("export_tensors")
            yield name, tensor

    def offload(self, *, keep_weights: bool) -> None:
        self._together("offload")
        self.host.take([self.moment])
        if not keep_weights:
            self.host.take(self.weights.values())

    def onload(self) -> None:
        self._together("onload")
        self.host.give_back()


def layout_of(ranks_of_engines: tuple[tuple[int, ...], ...]) -> ProcessLayout:
    return ProcessLayout(
        device="cuda",
        dtype="float32",
        trainers=tuple(TrainerPlacement(rank, 0, rank, rank) for rank in (0, 1)),
        tensor_parallel=1,
        engines=tuple(
            EnginePlacement(f"engine-{i}", 0, len(ranks), ranks, ",".join(map(str, ranks)), "tensor", ranks)
            for i, ranks in enumerate(ranks_of_engines)
        ),
        unused_gpus=(),
    )


class Job:
    """A job on shared GPUs: rank 0's half of the trainer, the fleet, and whose turn it is."""

    def __init__(self, group: TrainGroup, fleet: Fleet, layout: ProcessLayout) -> None:
        self.group, self.fleet = group, fleet
        self.pauses = Pauses()
        self.notes: list[str] = []
        self.turns = make_turns(layout, Config(), self.pauses, self.notes.append)
        self.transport = TensorTransport(fleet.controller.open_engine, bucket_bytes=BUCKET_BYTES, timeout_s=PATIENT_S)
        self.publisher = Publisher(
            ToldFleet(fleet.controller, self.pauses),
            group,
            self.transport,
            events=fleet.events,
            limits=PublicationLimits(begin_timeout_s=BOUND_S, cleanup_timeout_s=HURRIED_S),
        )
        self.steps = 0
        self.published = 0

    offload = property(lambda self: self.group.offload)
    onload = property(lambda self: self.group.onload)

    @property
    def halves(self) -> Halves:
        halves: Any = (self.fleet.controller, self)
        return Halves(*halves)

    @property
    def version(self) -> str:
        return f"0.{self.published}"

    async def update_weights(self, rollout_id: int | None) -> PublicationReport:
        self.published += 1
        return await self.publisher.publish(self.version)

    async def train(self) -> None:
        """The trainer's turn up to its end."""
        with anyio.fail_after(BOUND_S):
            await self.turns.trainers_turn(self.halves)
            assert all(engine.offloaded or not engine.alive for engine in self.fleet.engines), "they share the GPUs"
            await self.group.train_sft(None, make_batch(), 0.1)
            self.steps += 1

    async def publish(self) -> None:
        with anyio.fail_after(BOUND_S):
            await self.turns.publish(self.halves, None)

    async def check(self) -> None:
        """Nothing is paused or torn, and what serves has the trainer's weights of the newest version."""
        assert self.pauses.reasons == () and self.fleet.controller.statistics().open_lease is None
        await eventually(lambda: not [wait for wait in WAITS.snapshot() if wait.what.startswith("handover")])
        for number, engine in enumerate(self.fleet.engines):
            serves = self.fleet.states()[number] == "serving"
            routed = engine.url in self.fleet.router.workers
            assert not engine.session or not engine.alive
            assert not (engine.alive and not engine.offloaded and engine.paused), f"engine-{number} is paused"
            if serves or routed:
                assert engine.version == self.version, f"engine-{number} serves {engine.version}"
                for name, tensor in weights().items():
                    expected = tensor.clone()
                    for _ in range(self.steps):
                        expected += 1.0
                    assert torch.equal(engine.weights.tensors[name], expected), f"engine-{number} is torn"

    async def generates(self) -> bool:
        """All engines serve the newest version, and one of them answers a request with it."""
        await eventually(lambda: set(self.fleet.states()) == {"serving"})
        await self.check()
        answer = await self.fleet.controller._started.actor.routing.router.probe(self.version)
        return len(answer.output_ids) == 1


@asynccontextmanager
async def job_of(group: TrainGroup, engines: tuple[tuple[int, ...], ...]) -> AsyncIterator[Job]:
    """A job that has published the weights that it began with."""
    layout = layout_of(engines)
    with tempfile.TemporaryDirectory() as directory:
        tensors = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
        settings: dict[str, Any] = {"layout": layout, "tensors": tensors, "restarts": 50}
        async with fleet_of(Path(directory), len(engines), colocated=True, **settings) as fleet:
            job = Job(group, fleet, layout)
            await job.turns.make_room(fleet.controller)
            await group.init()
            await job.publish()
            yield job


def in_a_world(
    scenario: Callable[[Job], Awaitable[Any]],
    layout: str = "two engines of one rank",
    *,
    faults: Faults | None = None,
    step_timeout_s: float = 60.0,
) -> Any:
    async def play(group: TrainGroup, events: EventLog) -> Any:
        async with job_of(group, LAYOUTS[layout]) as job:
            return await scenario(job)

    backend = partial(SharingBackend, faults=faults or {})
    config = {"train": {"step_timeout_s": step_timeout_s}}
    return run_world(play, make_backend=backend, config=config, timeout_s=100.0).value


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_and_trainer_change_places_and_each_engine_has_the_weights_of_its_ranks(layout: str) -> None:
    async def turns(job: Job) -> list[Any]:
        assert await job.generates()
        for _ in range(2):
            await job.train()
            await job.publish()
            assert await job.generates()
        return [engine.memory_calls[-3:] for engine in job.fleet.engines]

    rest = ("kv_cache", "cuda_graph")
    for calls in in_a_world(turns, layout):
        assert calls == [
            ("release", (*rest, "weights")),
            ("resume", ("weights",)),
            ("resume", rest[::-1]),
        ]


def hurry(job: Job) -> None:
    """From now on calls to engine-1 that are to fail have short deadlines, and it is started again at once."""
    faults = job.fleet.engines[1].faults

    def impatient(what: str, subject: str, timeout_s: float) -> AbstractContextManager[None]:
        fails = subject == "engine-1" and faults.concern(what)
        return waiting(what, subject, min(timeout_s, HURRIED_S) if fails else timeout_s)

    engine_api.waiting = impatient  # type: ignore[assignment, misc]  # in the world's own process
    restarts.LONGEST_DELAY_S = 0.0


async def leave(job: Job) -> None:
    """A whole turn after something went wrong: everybody takes part in it."""
    for engine in job.fleet.engines:
        engine.faults.clear()
    await eventually(lambda: not {"starting", "dead", "quarantined", "updating"}.intersection(job.fleet.states()))
    await job.train()
    await job.publish()
    assert await job.generates()


UPDATE = "update_weights_from_tensor"
STEPS: list[tuple[str, int]] = [
    ("pause_generation", 1),
    ("release_memory_occupation", 1),
    ("resume_memory_occupation", 1),
    ("begin_weight_update", 1),
    (UPDATE, 1),
    (UPDATE, 2),
    ("end_weight_update", 1),
    ("resume_memory_occupation", 2),
]
"""Calls to an engine in one turn, in this order."""
SLOW = [("release_memory_occupation", 1), (UPDATE, 2), ("resume_memory_occupation", 2)]
"""Where an engine that hangs is tried: each costs a deadline."""


def test_an_engine_that_fails_at_any_step_of_a_turn_costs_the_other_one_nothing() -> None:
    async def fail_everywhere(job: Job) -> list[str]:
        hurry(job)
        told = []
        for how in (refuse, die, hang):
            for endpoint, nth in STEPS:
                if how is hang and (endpoint, nth) not in SLOW:
                    continue
                job.fleet.engines[1].script(how(endpoint, nth=nth))
                await job.train()
                await job.publish()
                assert job.fleet.engines[1].faults.happened, (how, endpoint, nth)
                assert job.fleet.states()[0] == "serving", (how, endpoint, nth)
                await job.check()
                job.fleet.engines[1].faults.happened.clear()
                await leave(job)
                told.append(f"{how.__name__} {endpoint} {nth}")
        return told

    assert len(in_a_world(fail_everywhere)) == 2 * len(STEPS) + len(SLOW)


def test_a_turn_that_is_cancelled_at_any_step_leaves_nothing_behind() -> None:
    async def cancel_everywhere(job: Job) -> int:
        restarts.LONGEST_DELAY_S = 0.0
        for endpoint, nth in STEPS:
            scope = anyio.CancelScope()

            async def cancel(scope: anyio.CancelScope = scope) -> None:
                scope.cancel()

            job.fleet.engines[1].script(instead(endpoint, cancel, nth=nth))
            with anyio.fail_after(BOUND_S), scope:
                await job.train()
                await job.publish()
            assert scope.cancelled_caught, (endpoint, nth)
            job.fleet.engines[1].faults.clear()
            await job.train()
            await job.publish()
            await job.check()
            await leave(job)
        return len(STEPS)

    assert in_a_world(cancel_everywhere) == len(STEPS)


class Nth:
    """A fault of a rank at the nth call of a method."""

    def __init__(self, nth: int, fault: Callable[[], None]) -> None:
        self.left, self.fault = nth, fault

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.fault()


@pytest.mark.parametrize(
    ("method", "nth", "fault", "told"),
    [
        ("onload", 1, worlds.hang, r"loading the trainer back did not end within 2 s\nrank 0 is at"),
        ("offload", 3, worlds.die, "trainer rank 1: its process ended"),
        ("export_tensors", 6, worlds.die, "trainer rank 1: its process ended"),
        (
            "export_tensors",
            6,
            worlds.hang,
            r"(?s)ranks 0, 1 offered no tensors of bucket 1 within 2 s.*\nrank 1 is at:\n.*time.sleep",
        ),
    ],
)
def test_a_rank_that_is_lost_ends_the_turn_within_its_deadline_by_name(
    method: str, nth: int, fault: Callable[[], None], told: str
) -> None:
    async def lose(job: Job) -> list[str]:
        job.transport._timeout_s = 2 * HURRIED_S
        ranks.SHUTDOWN_TIMEOUT_S = 0.2
        with pytest.raises(TrainerError, match=told):
            await job.train()
            await job.publish()
        controller = job.fleet.controller
        assert controller.statistics().open_lease is None
        assert job.published < 2 or job.pauses.reasons == ()
        assert not any(engine.session for engine in job.fleet.engines)
        assert all(engine.paused or not engine.version.startswith("torn") for engine in job.fleet.engines)
        return job.fleet.states()

    faults = {(1, method): Nth(nth, fault)}
    states = in_a_world(lose, faults=faults, step_timeout_s=2.0)
    assert "serving" not in states, "the GPUs are not free"
