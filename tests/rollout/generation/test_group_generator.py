"""Groups in the making: which request gets a slot, when it is given back, when samples are scored, and how it ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
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
from asyncrl.rollout.generation.group_generator import GroupGenerator, Unobserved
from asyncrl.rollout.generation.programs import Program, single_turn
from asyncrl.rollout.generation.session import Session
from asyncrl.rollout.generation.slots import Slots
from asyncrl.rollout.requests.generate_client import GenerateClient, GenerationFailed
from asyncrl.rollout.requests.wire import Generation, SamplingParams
from asyncrl.rollout.rewards.registry import RewardFunction, Runs
from asyncrl.rollout.rewards.result import ABSTAINED, RewardScope
from asyncrl.rollout.rewards.scorer import Scorer
from asyncrl.tasks import Changes
from tests.rollout.fleet import eventually

PROMPT = Prompt("p", "1+1=", np.array([1, 2], np.int32))
SAMPLING = SamplingParams(max_new_tokens=4, temperature=1.0)
GENERATION = Generation(np.array([3], np.int32), np.array([-1.0], np.float32), "stop", (VersionSpan("0.0", 0, 1),), "x")


@dataclass
class Engines:
    """Each request waits until its sample, or everything, is to be answered. Those of later turns end in `t` + turn."""

    asked: list[str] = field(default_factory=list)
    under_way: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    """Requests that fail when they are answered."""
    inputs: list[bytes] = field(default_factory=list)
    _answered: set[str] = field(default_factory=set)
    _all_answered: bool = False
    _changes: Changes = field(default_factory=Changes)

    def answer(self, *sample_ids: str) -> None:
        """No names: everything, from now on."""
        self._answered.update(sample_ids)
        self._all_answered |= not sample_ids
        self._changes.notify()

    async def generate(self, sample_id: str, input_ids: msgspec.Raw, sampling: msgspec.Raw, *, turn: int) -> Generation:
        name = sample_id + (f"t{turn}" if turn else "")
        self.asked.append(name)
        self.under_way.append(name)
        self.inputs.append(bytes(input_ids))
        try:
            while not self._all_answered and name not in self._answered:
                await self._changes.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled.append(name)
            raise
        finally:
            self.under_way.remove(name)
        if name in self.broken:
            raise GenerationFailed("timed_out: no answer")
        return GENERATION


def scoring(runs: Runs, call: object, scope: RewardScope = "sample") -> Scorer:
    function = RewardFunction("test", {}, call, runs, "", scope)  # type: ignore[arg-type]
    return Scorer(function, RewardConfig(workers=0, timeout_s=5), host=None, log_dir=Path())


def at_once() -> Scorer:
    return scoring(Runs.INLINE, lambda sample, prompt: 1.0)


@dataclass
class Rig:
    engines: Engines
    generator: GroupGenerator
    slots: Slots
    tasks: TaskGroup
    """Of the callers."""
    workers: anyio.CancelScope
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
async def rig(concurrency: int, scorer: Scorer, program: Program = single_turn) -> AsyncIterator[Rig]:
    engines, slots = Engines(), Slots(concurrency)
    generator = GroupGenerator(cast(GenerateClient, engines), scorer, slots, vocab_size=64, program=program)
    async with anyio.create_task_group() as outer:
        workers = anyio.CancelScope()

        async def serve(*, task_status: TaskStatus[None]) -> None:
            with workers:
                async with anyio.create_task_group() as task_group:
                    generator.start(task_group)
                    task_status.started()
                    await anyio.sleep_forever()

        await outer.start(serve)
        async with anyio.create_task_group() as tasks:
            yield Rig(engines, generator, slots, tasks, workers)
        workers.cancel()


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
        assert r.slots.in_use == 3
        r.engines.answer()
    assert sorted(group.group_id for group in r.groups) == ["a", "b", "c"] and r.slots.in_use == 0
    assert [sample.sample_id for group in r.groups for sample in group.samples][:2] == ["b.000", "b.001"]


async def test_a_limit_that_rises_is_used_at_once_and_one_that_falls_ends_nothing() -> None:
    async with rig(1, at_once()) as r:
        r.begin("a", 4)
        await eventually(lambda: len(r.engines.under_way) == 1)
        r.slots.limit = 3
        await eventually(lambda: len(r.engines.under_way) == 3)
        r.slots.limit = 1
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
        await eventually(lambda: len(r.engines.asked) == 6 and r.slots.in_use == 0)
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
    assert [group.group_id for group in r.groups][-1] == "last" and r.slots.in_use == 0


async def test_while_it_is_held_no_sample_is_begun() -> None:
    async with rig(2, at_once()) as r:
        r.begin("a", 4)
        await eventually(lambda: len(r.engines.under_way) == 2)
        with r.slots.holding():
            r.engines.answer()
            await eventually(lambda: r.slots.in_use == 0)
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
            r.workers.cancel()
        await eventually(lambda: len(r.errors) == 2)
        r.begin("c")
    assert r.engines.cancelled == ["a.000"]
    if how == "closed":
        assert sorted(str(error) for error in r.errors[:2]) == [
            f"the connection was closed when 0 of 2 samples of {group} were made" for group in "ab"
        ]
        assert "the connection is not open" in str(r.errors[2])


# a group reward


async def test_a_group_reward_is_asked_once_when_the_last_sample_is_generated() -> None:
    calls: list[list[str]] = []

    async def ranked(samples: Sequence[Sample], prompt: Prompt) -> list[float]:
        calls.append([sample.sample_id for sample in samples])
        return [float(index) for index in range(len(samples))]

    async with rig(2, scoring(Runs.LOOP, ranked, "group")) as r:
        r.begin("a", 3)
        r.begin("b", 1)
        await eventually(lambda: r.engines.under_way == ["a.000", "a.001"])
        r.engines.answer("a.001", "a.002", "b.000")
        await eventually(lambda: [group.group_id for group in r.groups] == ["b"])
        await anyio.wait_all_tasks_blocked()
        assert calls == [["b.000"]], "a.000 is still being generated, and the samples before it wait without a slot"
        assert r.slots.in_use == 1
        r.engines.answer()
    assert calls[1:] == [["a.000", "a.001", "a.002"]]
    assert [sample.reward for sample in r.groups[1].samples] == [0.0, 1.0, 2.0]


async def test_a_group_reward_sees_what_was_generated_and_may_abstain() -> None:
    seen: list[tuple[str, str | None]] = []

    class Watch(Unobserved):
        def scored(self, sample: Sample) -> None:
            seen.append((sample.sample_id, sample.failure))

    def judge(samples: Sequence[Sample], prompt: Prompt) -> list[float | None]:
        return [None if sample.sample_id == "a.000" else 1.0 for sample in samples]

    scorer = scoring(Runs.INLINE, judge, "group")
    async with rig(4, scorer) as r:
        r.engines.broken = {"a.001", "b.000", "b.001"}
        r.engines.answer()
        group = await r.generator.run("a", PROMPT, SAMPLING, 3, Watch())
        assert [(sample.reward, sample.failure) for sample in group.samples] == [
            (None, ABSTAINED),
            (None, "generation timed_out: no answer"),
            (1.0, None),
        ]
        assert seen == [("a.000", ABSTAINED), ("a.002", None)]
        lost = await r.generator.run("b", PROMPT, SAMPLING, 2)
        assert [sample.failure for sample in lost.samples] == ["generation timed_out: no answer"] * 2
    assert not scorer.failures, "to abstain is no fault"


async def test_a_group_reward_that_fails_fails_each_of_its_samples() -> None:
    def two(samples: Sequence[Sample], prompt: Prompt) -> list[float]:
        return [1.0, 2.0]

    scorer = scoring(Runs.INLINE, two, "group")
    async with rig(4, scorer) as r:
        r.engines.answer()
        group = await r.generator.run("a", PROMPT, SAMPLING, 3)
    failure = "the reward function returned 2 numbers for 3 samples"
    assert [sample.failure for sample in group.samples] == [failure] * 3 and scorer.failures == {failure: 3}


async def test_a_group_that_is_closed_while_it_is_scored_is_not_whole() -> None:
    async def slow(samples: Sequence[Sample], prompt: Prompt) -> list[float]:
        await anyio.sleep_forever()
        return []

    async with rig(4, scoring(Runs.LOOP, slow, "group")) as r:
        r.engines.answer()
        r.begin("a", 2)
        await eventually(lambda: len(r.engines.asked) == 2 and r.slots.in_use == 0)
        await r.generator.aclose()
    assert [str(error) for error in r.errors] == ["the connection was closed when 0 of 2 samples of a were made"]


# programs of several turns


def joined(*parts: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


@dataclass
class Talk:
    """Asks, waits for a tool, and asks again."""

    tool: anyio.Event = field(default_factory=anyio.Event)
    waiting: list[str] = field(default_factory=list)

    async def __call__(self, session: Session, prompt: Prompt) -> None:
        answer = await session.generate(prompt.token_ids)
        self.waiting.append(session.sample_id)
        await self.tool.wait()
        await session.generate(joined(prompt.token_ids, answer.output_ids, [9, 9]))


async def test_a_session_holds_no_slot_between_its_requests_and_goes_before_new_ones() -> None:
    talk = Talk()
    async with rig(1, at_once(), talk) as r:
        r.begin("a", 3)
        await eventually(lambda: r.engines.under_way == ["a.000"])
        r.engines.answer("a.000")
        await eventually(lambda: r.engines.under_way == ["a.001"])  # while a.000 waits for its tool
        talk.tool.set()
        await anyio.wait_all_tasks_blocked()
        assert r.engines.asked == ["a.000", "a.001"] and r.slots.in_use == 1
        r.engines.answer("a.001")
        await eventually(lambda: r.engines.under_way == ["a.000t1"])
        r.engines.answer()
    assert r.engines.asked == ["a.000", "a.001", "a.000t1", "a.001t1", "a.002", "a.002t1"]
    [first, *_] = r.groups[0].samples
    assert [turn.context_ids.tolist() for turn in first.turns] == [[1, 2], [9, 9]] and len(first.sequences) == 1
    assert [json.loads(sent) for sent in r.engines.inputs[:1]] == [[1, 2]]


@pytest.mark.parametrize("given", [False, True])
async def test_a_request_that_is_cancelled_while_it_waits_for_a_slot_costs_none(given: bool) -> None:
    talk = Talk()
    talk.tool.set()
    async with rig(2, at_once(), talk) as r:
        first = r.begin("a", 1)
        await eventually(lambda: r.engines.under_way == ["a.000"])
        r.slots.limit = 0
        r.engines.answer("a.000")
        await eventually(lambda: len(r.slots._waiting) == 1)
        if given:
            r.slots.limit = 1
        first.cancel()
        await eventually(lambda: r.slots.in_use == 0 and not r.slots._waiting)
        r.slots.limit = 1
        r.engines.answer()
        r.begin("b", 1)
    assert [group.group_id for group in r.groups] == ["b"]


async def test_a_program_that_asks_nothing_fails_its_sample_and_gives_its_slot_back() -> None:
    async def idle(session: Session, prompt: Prompt) -> None:
        await anyio.lowlevel.checkpoint()

    async with rig(1, at_once(), idle) as r:
        r.begin("a", 3)
    assert [sample.failure for sample in r.groups[0].samples] == ["generation: the program made no request"] * 3
    assert r.slots.in_use == 0


async def test_a_request_that_fails_in_a_later_turn_fails_its_sample_only() -> None:
    talk = Talk()
    talk.tool.set()
    async with rig(2, at_once(), talk) as r:
        r.engines.broken = {"a.001t1"}
        r.engines.answer()
        r.begin("a", 2)
    good, bad = r.groups[0].samples
    assert good.reward == 1.0 and bad.failure == "generation timed_out: no answer" and bad.sequences == ()
