"""GroupGenerator: one prompt in, one group of scored samples out.

Samples are made in *slots*, as many as requests may be in flight. A task that holds one goes from sample to sample for
as long as there are any, so that under load a sample costs neither a task nor a scope to be cancelled by.

Invariants
- A group always comes back whole: a sample that could not be generated or scored is in it with `reward` None and a
  `failure`; it never costs the other samples of its group.
- At most `concurrency` requests are in flight, over all groups; who came first is sent first. A limit that is lowered
  ends nothing: what is in flight beyond it goes on. To be scored takes no slot.
- While generation is held, no sample is begun; where it is not to end before, no request is sent either.
- `run` returns when nothing is under way for it any more, also where it fails or is cancelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup
from msgspec.structs import replace

from asyncrl.data.sample import Prompt, Sample, SampleGroup, Turn
from asyncrl.errors import RolloutError
from asyncrl.observability.waits import waiting
from asyncrl.rollout.requests.generate_client import GenerateClient, GenerationFailed
from asyncrl.rollout.requests.wire import SamplingParams, encode_prompt
from asyncrl.rollout.rewards.scorer import Scorer

_CLOSE_TIMEOUT_S = 5.0

_log = structlog.get_logger(__name__)


def _ignore(*_: object) -> None:
    """Nobody listens."""


@dataclass(slots=True, eq=False)
class _Group:
    """A group in the making."""

    group_id: str
    prompt: Prompt
    input_ids: msgspec.Raw
    sampling_params: msgspec.Raw
    on_started: Callable[[], None]
    on_scored: Callable[[Sample], None]
    samples: list[Sample | None]
    begun: int = 0
    """Samples that got a slot; all of them once it was given up."""
    under_way: dict[int, anyio.CancelScope] = field(default_factory=dict)
    """What cancels a sample, by its index."""
    ended: anyio.Event = field(default_factory=anyio.Event)

    @property
    def all_begun(self) -> bool:
        return self.begun == len(self.samples)

    def give_up(self) -> None:
        """Begins no more samples, and cancels those that are under way."""
        self.begun = len(self.samples)
        for scope in self.under_way.values():
            scope.cancel()
        self.end_if_done()

    def end_if_done(self) -> None:
        if self.all_begun and not self.under_way:
            self.ended.set()


class GroupGenerator:
    """Samples and scores groups from `start` to `aclose`."""

    def __init__(self, client: GenerateClient, scorer: Scorer, *, concurrency: int, vocab_size: int) -> None:
        self._client = client
        self._scorer = scorer
        self._vocab_size = vocab_size
        self._limit = concurrency
        self._tasks: TaskGroup | None = None
        self._groups: dict[_Group, None] = {}
        """Those of the `run`s in progress."""
        self._queue: deque[_Group] = deque()
        """Groups with samples that wait for a slot; some may have been given up."""
        self._held = 0
        self._running = 0
        self._none_running = anyio.Event()

    def start(self, task_group: TaskGroup) -> None:
        """Its tasks live in `task_group`, none of them longer than the `run` that it works for."""
        self._tasks = task_group

    async def aclose(self) -> None:
        """Each `run` in progress raises RolloutError, and so does every later one. Idempotent."""
        self._close()
        with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
            for group in tuple(self._groups):
                await group.ended.wait()

    def _close(self) -> None:
        self._tasks = None
        for group in self._groups:
            group.give_up()

    @property
    def running(self) -> int:
        """Samples being generated: on the wire, or waiting to be sent again."""
        return self._running

    @property
    def concurrency(self) -> int:
        return self._limit

    @concurrency.setter
    def concurrency(self, limit: int) -> None:
        self._limit = limit
        self._fill()

    @asynccontextmanager
    async def drained(self, timeout_s: float) -> AsyncIterator[None]:
        """Begins nothing new, and enters once all that is in flight has ended, or after `timeout_s` all the same."""
        with self._holding():
            try:
                with waiting("end of the requests in flight", "engines", timeout_s):
                    while self._running:
                        await self._none_running.wait()
            except TimeoutError as error:
                _log.warning("the weights are updated all the same", reason=str(error), requests=self._running)
            yield

    @contextmanager
    def held(self) -> Iterator[None]:
        """Sends nothing, while what is in flight goes on."""
        with self._holding(), self._client.held():
            yield

    @contextmanager
    def _holding(self) -> Iterator[None]:
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self._fill()

    async def run(
        self,
        group_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        num_samples: int,
        *,
        on_started: Callable[[], None] = _ignore,
        on_scored: Callable[[Sample], None] = _ignore,
    ) -> SampleGroup:
        """`num_samples` samples of `prompt`.

        `on_started` is called once, when the first of them gets its slot; `on_scored` with each one that was generated.
        Raises RolloutError on `aclose`.
        """
        if self._tasks is None:
            raise RolloutError(f"no engine can be asked for {group_id}: the connection is not open")
        input_ids = encode_prompt(prompt.token_ids, self._vocab_size)
        samples: list[Sample | None] = [None] * num_samples
        group = _Group(group_id, prompt, input_ids, sampling.encode(), on_started, on_scored, samples)
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
        made = tuple(sample for sample in samples if sample is not None)
        if len(made) < num_samples:
            progress = f"{len(made)} of {num_samples} samples of {group_id} were made"
            raise RolloutError(f"the connection was closed when {progress}")
        return SampleGroup(group_id, prompt, made)

    def _fill(self) -> None:
        """Has a task begin in each slot that is free and wanted."""
        while self._wanted():
            assert self._tasks is not None, "without tasks there are no groups"
            scope = anyio.CancelScope()
            self._tasks.start_soon(self._serve, scope, *self._take(scope), name="slot")

    def _wanted(self) -> bool:
        """Whether there is both a free slot and a sample for it."""
        while self._queue and self._queue[0].all_begun:
            self._queue.popleft()
        return bool(self._queue) and self._running < self._limit and not self._held

    def _take(self, scope: anyio.CancelScope) -> tuple[_Group, int]:
        """A slot, for the sample that is returned, which `scope` cancels."""
        group = self._queue[0]
        index, group.begun = group.begun, group.begun + 1
        group.under_way[index] = scope
        self._running += 1
        if index == 0:
            group.on_started()
        return group, index

    async def _serve(self, scope: anyio.CancelScope, group: _Group, index: int) -> None:
        """One slot, from sample to sample until it is not wanted any more, or `scope` was cancelled."""
        try:
            with scope:
                await self._make(group, index)
                while self._wanted() and not scope.cancel_called:
                    await self._make(*self._take(scope))
        except BaseException:  # the task group ends: nobody is to wait for slots that nobody serves
            self._close()
            raise
        self._fill()

    async def _make(self, group: _Group, index: int) -> None:
        """Has one sample generated in the slot that was taken for it, and scored."""
        try:
            sample = await self._generate(group, f"{group.group_id}.{index:03d}")
            if sample.failure is None:
                if not self._scorer.immediate:
                    self._fill()  # this task does not use its slot while it waits for the score
                score = await self._scorer.score(sample, group.prompt)
                sample = replace(sample, reward=score.reward, failure=score.failure)
                group.on_scored(sample)
            group.samples[index] = sample
        finally:
            del group.under_way[index]
            group.end_if_done()

    async def _generate(self, group: _Group, sample_id: str) -> Sample:
        """Gives its slot back at the end."""
        try:
            generation = await self._client.generate(sample_id, group.input_ids, group.sampling_params)
        except GenerationFailed as failure:
            return Sample(sample_id, group.group_id, (), "abort", "", failure=f"generation {failure}")
        finally:
            self._running -= 1
            if not self._running:
                self._none_running.set()
                self._none_running = anyio.Event()
        turn = Turn(group.prompt.token_ids, generation.output_ids, generation.logprobs, generation.versions)
        return Sample.of_turn(
            sample_id, group.group_id, turn, finish_reason=generation.finish_reason, text=generation.text
        )
