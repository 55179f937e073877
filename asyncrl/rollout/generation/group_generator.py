"""GroupGenerator: one prompt in, one group of scored samples out.

    run ──► queue of groups ──► worker: session, program, score ──► group whole ──► run returns
                                  │ ▲
                               slots (slots.py), one for each request in flight

A worker is a task that makes one sample after the other. A new one is started only where a slot is free and no worker
goes on in it in the same turn of the loop, so that under load a sample costs neither a task nor a cancel scope.

Invariants
- A group always comes back whole: a sample that could not be generated or scored is in it with `reward` None and a
  `failure`; it never costs the other samples of its group.
- A sample is begun only with a slot; groups get slots in the order in which they came.
- A sample is scored as soon as it is generated, or all samples of a group as soon as the last one is; to be scored
  takes no slot.
- `run` returns when nothing is under way for it any more, also where it fails or is cancelled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import anyio
from anyio.abc import TaskGroup
from msgspec.structs import replace

from asyncrl.data.sample import Prompt, Sample, SampleGroup
from asyncrl.errors import RolloutError
from asyncrl.rollout.generation.programs import Program, single_turn
from asyncrl.rollout.generation.session import EncodedPrompt, Session, failed_sample
from asyncrl.rollout.generation.slots import Slots
from asyncrl.rollout.requests.generate_client import GenerateClient, GenerationFailed
from asyncrl.rollout.requests.wire import SamplingParams
from asyncrl.rollout.rewards.result import Score
from asyncrl.rollout.rewards.scorer import Scorer

_CLOSE_TIMEOUT_S = 5.0


class GroupObserver(Protocol):
    """Learns how a group comes along. Its methods must return at once."""

    def started(self) -> None:
        """The first sample got its slot."""

    def scored(self, sample: Sample) -> None:
        """A sample that was generated has its reward, or a failure in its place."""


class Unobserved:
    """A GroupObserver that ignores everything."""

    def started(self) -> None:
        """Ignores it."""

    def scored(self, sample: Sample) -> None:
        """Ignores it."""


@dataclass(slots=True, eq=False)
class _Group:
    """A group in the making."""

    group_id: str
    prompt: Prompt
    encoded: EncodedPrompt
    observer: GroupObserver
    samples: list[Sample | None]
    """By index; None until it is scored, or has failed."""
    unscored: dict[int, Sample] = field(default_factory=dict)
    """Samples that wait for the last one of their group to be generated, by index."""
    begun: int = 0
    """Samples that got a slot; all of them once the group was given up."""
    under_way: dict[int, anyio.CancelScope] = field(default_factory=dict)
    """What cancels a sample, by its index."""
    ended: anyio.Event = field(default_factory=anyio.Event)

    @property
    def all_begun(self) -> bool:
        """Whether no sample waits for a slot."""
        return self.begun == len(self.samples)

    def scored(self, sample: Sample, score: Score) -> Sample:
        """The sample with its score."""
        sample = replace(sample, reward=score.reward, failure=score.failure, reward_parts=score.parts)
        self.observer.scored(sample)
        return sample

    def give_up(self) -> None:
        """Begins no more samples, and cancels those that are under way."""
        self.begun = len(self.samples)
        for scope in self.under_way.values():
            scope.cancel()
        self.end_if_done()

    def end_if_done(self) -> None:
        """Sets `ended` when nothing is under way for it any more."""
        if self.all_begun and not self.under_way:
            self.ended.set()


class GroupGenerator:
    """Samples and scores groups from `start` to `aclose`."""

    def __init__(
        self,
        client: GenerateClient,
        scorer: Scorer,
        slots: Slots,
        *,
        vocab_size: int,
        program: Program = single_turn,
    ) -> None:
        """`program` makes each sample."""
        self._client = client
        self._scorer = scorer
        self._slots = slots
        self._vocab_size = vocab_size
        self._program = program
        self._tasks: TaskGroup | None = None
        self._watching = anyio.CancelScope()
        self._groups: dict[_Group, None] = {}
        """Those of the `run`s in progress."""
        self._queue: deque[_Group] = deque()
        """Groups with samples that wait for a slot; some may have been given up."""

    def start(self, task_group: TaskGroup) -> None:
        """Its tasks live in `task_group` until `aclose`."""
        self._tasks = task_group
        task_group.start_soon(self._watch_slots, name="slots")

    async def aclose(self) -> None:
        """Each `run` in progress raises RolloutError, and so does every later one. Idempotent."""
        self._close()
        with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
            for group in tuple(self._groups):
                await group.ended.wait()

    async def run(
        self,
        group_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        num_samples: int,
        observer: GroupObserver | None = None,
    ) -> SampleGroup:
        """`num_samples` samples of `prompt`, which `observer` may follow. Raises RolloutError on `aclose`."""
        if self._tasks is None:
            raise RolloutError(f"no engine can be asked for {group_id}: the connection is not open")
        encoded = EncodedPrompt.of(prompt.token_ids, sampling, self._vocab_size)
        group = _Group(group_id, prompt, encoded, observer or Unobserved(), [None] * num_samples)
        self._groups[group] = None
        self._queue.append(group)
        self._fill()
        try:
            await group.ended.wait()
        finally:
            del self._groups[group]
            if not group.ended.is_set():
                group.give_up()
                with anyio.CancelScope(shield=True):
                    await group.ended.wait()
        made = tuple(sample for sample in group.samples if sample is not None)
        if len(made) < num_samples:
            progress = f"{len(made)} of {num_samples} samples of {group_id} were made"
            raise RolloutError(f"the connection was closed when {progress}")
        return SampleGroup(group_id, prompt, made)

    def _close(self) -> None:
        self._tasks = None
        self._watching.cancel()
        for group in self._groups:
            group.give_up()

    async def _watch_slots(self) -> None:
        """Has a worker start in each slot that became free and in which none went on in the same turn of the loop."""
        try:
            with self._watching:
                while True:
                    await self._slots.changes.wait()
                    self._fill()
        finally:  # also where the task group ends: no `run` is to wait for workers that do not come
            self._close()

    def _fill(self) -> None:
        """Starts a worker in each slot that is free and wanted."""
        while self._wanted:
            assert self._tasks is not None, "a generator that is closed has no samples left to begin"
            scope = anyio.CancelScope()
            self._tasks.start_soon(self._work, scope, *self._take(scope), name="slot")

    @property
    def _wanted(self) -> bool:
        """Whether there is both a free slot and a sample for it."""
        while self._queue and self._queue[0].all_begun:
            self._queue.popleft()
        return bool(self._queue) and self._slots.free

    def _take(self, scope: anyio.CancelScope) -> tuple[_Group, int]:
        """A slot, for the sample that is returned, which `scope` cancels."""
        group = self._queue[0]
        index, group.begun = group.begun, group.begun + 1
        group.under_way[index] = scope
        self._slots.take()
        if index == 0:
            group.observer.started()
        return group, index

    async def _work(self, scope: anyio.CancelScope, group: _Group, index: int) -> None:
        """Makes one sample after the other, until none is wanted or `scope` was cancelled."""
        with scope:
            await self._make(group, index)
            while self._wanted and not scope.cancel_called:
                await self._make(*self._take(scope))

    async def _make(self, group: _Group, index: int) -> None:
        """Makes one sample, for which a slot was taken, and scores it or its group."""
        try:
            sample = await self._generate(group, f"{group.group_id}.{index:03d}")
            if self._scorer.by_group:
                group.unscored[index] = sample
                if len(group.unscored) == len(group.samples):
                    await self._score_group(group)
            else:
                if sample.failure is None:
                    sample = group.scored(sample, await self._scorer.score(sample, group.prompt))
                group.samples[index] = sample
        finally:
            del group.under_way[index]
            group.end_if_done()

    async def _generate(self, group: _Group, sample_id: str) -> Sample:
        """Runs the program in a session of its own."""
        session = Session(sample_id, group.encoded, self._client, self._slots)
        try:
            await self._program(session, group.prompt)
        except GenerationFailed as failure:
            return failed_sample(sample_id, group.group_id, f"generation {failure}")
        finally:
            session.close()
        return session.sample(group.group_id)

    async def _score_group(self, group: _Group) -> None:
        """Scores a group whose samples have all ended; the reward sees those that were generated."""
        indices = [index for index, sample in sorted(group.unscored.items()) if sample.failure is None]
        generated = [group.unscored[index] for index in indices]
        scores = await self._scorer.score_together(generated, group.prompt) if generated else ()
        for index, sample, score in zip(indices, generated, scores, strict=True):
            group.unscored[index] = group.scored(sample, score)
        group.samples[:] = [group.unscored[index] for index in range(len(group.samples))]
