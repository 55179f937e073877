"""Slots: who gets one, when it is given back, and that nobody waits for one that is not served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import pytest
from anyio.abc import TaskGroup, TaskStatus

from asyncrl.config.sections.rollout import RewardConfig
from asyncrl.data.sample import Prompt, Sample, SampleGroup, VersionSpan
from asyncrl.errors import RolloutError
from asyncrl.rollout.requests.generate_client import GenerateClient
from asyncrl.rollout.requests.generation import GroupGenerator
from asyncrl.rollout.requests.wire import Generation, SamplingParams
from asyncrl.rollout.rewards.registry import RewardFunction, Runs
from asyncrl.rollout.rewards.scorer import Scorer
from tests.rollout.fleet import eventually

PROMPT = Prompt("p", "1+1=", np.array([1, 2], np.int32))
SAMPLING = SamplingParams(max_new_tokens=4, temperature=1.0)
GENERATION = Generation(np.array([3], np.int32), np.array([-1.0], np.float32), "stop", (VersionSpan("0.0", 0, 1),), "x")


@dataclass
class Engines:
    """Each request waits until its sample, or everything, is to be answered."""

    asked: list[str] = field(default_factory=list)
    under_way: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    _answered: set[str] = field(default_factory=set)
    _all_answered: bool = False
    _changed: anyio.Event = field(default_factory=anyio.Event)

    def answer(self, *sample_ids: str) -> None:
        """No names: everything, from now on."""
        self._answered.update(sample_ids)
        self._all_answered |= not sample_ids
        self._changed.set()
        self._changed = anyio.Event()

    async def generate(self, sample_id: str, input_ids: msgspec.Raw, sampling: msgspec.Raw) -> Generation:
        self.asked.append(sample_id)
        self.under_way.append(sample_id)
        try:
            while not self._all_answered and sample_id not in self._answered:
                await self._changed.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled.append(sample_id)
            raise
        finally:
            self.under_way.remove(sample_id)
        return GENERATION

    @contextmanager
    def held(self) -> Iterator[None]:
        yield


def scoring(runs: Runs, call: object) -> Scorer:
    function = RewardFunction("test", {}, call, runs, "")  # type: ignore[arg-type]
    return Scorer(function, RewardConfig(workers=0), host=None, log_dir=Path())


def at_once() -> Scorer:
    return scoring(Runs.INLINE, lambda sample, prompt: 1.0)


@dataclass
class Rig:
    engines: Engines
    generator: GroupGenerator
    tasks: TaskGroup
    """Of the callers."""
    slots: anyio.CancelScope
    groups: list[SampleGroup] = field(default_factory=list)
    errors: list[RolloutError] = field(default_factory=list)

    def begin(self, group_id: str, samples: int = 2) -> anyio.CancelScope:
        """Has a group made; cancel what is returned to give it up."""
        scope = anyio.CancelScope()

        async def run() -> None:
            with scope:
                try:
                    self.groups.append(await self.generator.run(group_id, PROMPT, SAMPLING, samples))
                except RolloutError as error:
                    self.errors.append(error)

        self.tasks.start_soon(run)
        return scope


@asynccontextmanager
async def rig(concurrency: int, scorer: Scorer) -> AsyncIterator[Rig]:
    engines = Engines()
    generator = GroupGenerator(cast(GenerateClient, engines), scorer, concurrency=concurrency, vocab_size=64)
    async with anyio.create_task_group() as outer:
        slots = anyio.CancelScope()

        async def serve(*, task_status: TaskStatus[None]) -> None:
            with slots:
                async with anyio.create_task_group() as task_group:
                    generator.start(task_group)
                    task_status.started()
                    await anyio.sleep_forever()

        await outer.start(serve)
        async with anyio.create_task_group() as tasks:
            yield Rig(engines, generator, tasks, slots)
        slots.cancel()


async def test_slots_go_to_who_came_first_and_a_group_is_whole_when_its_last_sample_is() -> None:
    async with rig(3, at_once()) as r:
        for group_id in ("a", "b", "c"):
            r.begin(group_id)
        await eventually(lambda: r.engines.under_way == ["a.000", "a.001", "b.000"])
        r.engines.answer("b.000")
        await eventually(lambda: r.engines.under_way == ["a.000", "a.001", "b.001"])
        r.engines.answer("b.001", "a.001")
        await eventually(lambda: r.engines.under_way == ["a.000", "c.000", "c.001"])
        await eventually(lambda: [group.group_id for group in r.groups] == ["b"])
        assert r.generator.running == 3
        r.engines.answer()
    assert sorted(group.group_id for group in r.groups) == ["a", "b", "c"] and r.generator.running == 0
    assert [sample.sample_id for group in r.groups for sample in group.samples][:2] == ["b.000", "b.001"]


async def test_a_limit_that_rises_is_used_at_once_and_one_that_falls_ends_nothing() -> None:
    async with rig(1, at_once()) as r:
        r.begin("a", 4)
        await eventually(lambda: len(r.engines.under_way) == 1)
        r.generator.concurrency = 3
        await eventually(lambda: len(r.engines.under_way) == 3)
        r.generator.concurrency = 1
        r.engines.answer("a.000")
        await eventually(lambda: len(r.engines.under_way) == 2)
        await anyio.wait_all_tasks_blocked()
        assert r.engines.under_way == ["a.001", "a.002"] and r.engines.cancelled == []
        r.engines.answer()
    assert len(r.groups[0].samples) == 4


async def test_a_sample_that_waits_for_its_score_holds_no_slot() -> None:
    scored = anyio.Event()

    async def slow(sample: Sample, prompt: Prompt) -> float:
        await scored.wait()
        return 1.0

    async with rig(1, scoring(Runs.LOOP, slow)) as r:
        r.engines.answer()
        r.begin("a", 3)
        r.begin("b", 3)
        await eventually(lambda: len(r.engines.asked) == 6 and r.generator.running == 0)
        assert r.groups == []
        scored.set()
    assert [len(group.samples) for group in r.groups] == [3, 3]


async def test_a_group_that_is_given_up_ends_its_requests_and_leaves_its_slots_to_the_others() -> None:
    async with rig(2, at_once()) as r:
        first = r.begin("a", 4)
        r.begin("b", 2)
        await eventually(lambda: r.engines.under_way == ["a.000", "a.001"])
        first.cancel()
        await eventually(lambda: r.engines.under_way == ["b.000", "b.001"])
        assert sorted(r.engines.cancelled) == ["a.000", "a.001"]
        r.engines.answer()
    assert [group.group_id for group in r.groups] == ["b"]


async def test_a_group_given_up_in_the_moment_in_which_it_got_a_slot_costs_no_slot() -> None:
    async with rig(1, at_once()) as r:
        for number in range(20):
            scope = r.begin(f"{number}", 3)
            for _ in range(number % 5):
                await anyio.lowlevel.checkpoint()
            scope.cancel()
        r.engines.answer()
        r.begin("last")
    assert [group.group_id for group in r.groups][-1] == "last" and r.generator.running == 0


async def test_while_it_is_held_no_sample_is_begun() -> None:
    async with rig(2, at_once()) as r:
        r.begin("a", 4)
        await eventually(lambda: len(r.engines.under_way) == 2)
        with r.generator.held():
            r.engines.answer()
            await eventually(lambda: r.generator.running == 0)
            await anyio.wait_all_tasks_blocked()
            assert r.groups == []
    assert len(r.groups[0].samples) == 4


@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_where_slots_end_nobody_waits_for_one(how: str) -> None:
    async with rig(1, at_once()) as r:
        r.begin("a")
        r.begin("b")
        await eventually(lambda: r.engines.under_way == ["a.000"])
        if how == "closed":
            await r.generator.aclose()
            assert r.engines.cancelled == ["a.000"], "it returns when that has happened"
        else:
            r.slots.cancel()
        await eventually(lambda: len(r.errors) == 2)
        r.begin("c")
    assert r.engines.cancelled == ["a.000"]
    if how == "closed":
        assert sorted(str(error) for error in r.errors[:2]) == [
            f"the connection was closed when 0 of 2 samples of {group} were made" for group in "ab"
        ]
        assert "the connection is not open" in str(r.errors[2])
