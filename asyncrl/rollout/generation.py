"""GroupGenerator: one prompt in, one group of scored samples out.

Invariants
- A group always comes back whole: a sample that could not be generated or scored is in it with `reward` None and a
  `failure`; it never costs the other samples of its group.
- At most `concurrency` requests are in flight, over all groups; who came first is sent first. A limit that is lowered
  ends nothing: what is in flight beyond it goes on.
- While generation is held, no sample is begun; where it is not to end before, no request is sent either.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import anyio
import msgspec
import numpy as np
import structlog

from asyncrl.data.sample import Prompt, Sample, SampleGroup
from asyncrl.observability.waits import waiting
from asyncrl.rollout.engine_client import EngineClient, GenerationFailed
from asyncrl.rollout.rewards.scorer import Scorer
from asyncrl.rollout.wire import SamplingParams, encode_prompt

_log = structlog.get_logger(__name__)


def _ignore(*_: object) -> None:
    """Nobody listens."""


class GroupGenerator:
    """Samples and scores groups."""

    def __init__(self, client: EngineClient, scorer: Scorer, *, concurrency: int, vocab_size: int) -> None:
        self._client = client
        self._scorer = scorer
        self._vocab_size = vocab_size
        self._slots = anyio.CapacityLimiter(concurrency)
        self._held = 0
        self._running = 0
        self._changed = anyio.Event()

    @property
    def running(self) -> int:
        """Samples being generated: on the wire, or waiting to be sent again."""
        return self._running

    @property
    def concurrency(self) -> int:
        return int(self._slots.total_tokens)

    @concurrency.setter
    def concurrency(self, limit: int) -> None:
        self._slots.total_tokens = limit

    @asynccontextmanager
    async def drained(self, timeout_s: float) -> AsyncIterator[None]:
        """Begins nothing new, and enters once all that is in flight has ended, or after `timeout_s` all the same."""
        with self._holding():
            try:
                with waiting("end of the requests in flight", "engines", timeout_s):
                    while self._running:
                        await self._changed.wait()
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
            self._wake()

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
        """
        input_ids = encode_prompt(prompt.token_ids, self._vocab_size)
        sampling_params = sampling.encode()
        samples: list[Sample | None] = [None] * num_samples
        started = False

        async def one(index: int) -> None:
            nonlocal started
            sample_id = f"{group_id}.{index:03d}"
            async with self._slots:
                while self._held:
                    await self._changed.wait()
                if not started:
                    started = True
                    on_started()
                self._running += 1
                try:
                    sample = await self._generate(sample_id, group_id, prompt, input_ids, sampling_params)
                finally:
                    self._running -= 1
                    if not self._running:
                        self._wake()
            if sample.failure is None:
                score = await self._scorer.score(sample, prompt)
                sample = replace(sample, reward=score.reward, failure=score.failure)
                on_scored(sample)
            samples[index] = sample

        async with anyio.create_task_group() as group:
            for index in range(num_samples):
                group.start_soon(one, index)
        return SampleGroup(group_id, prompt, tuple(sample for sample in samples if sample is not None))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _generate(
        self, sample_id: str, group_id: str, prompt: Prompt, input_ids: msgspec.Raw, sampling_params: msgspec.Raw
    ) -> Sample:
        try:
            generation = await self._client.generate(sample_id, input_ids, sampling_params)
        except GenerationFailed as failure:
            return Sample(
                sample_id=sample_id,
                group_id=group_id,
                prompt_ids=prompt.token_ids,
                output_ids=np.empty(0, np.int32),
                logprobs=np.empty(0, np.float32),
                finish_reason="abort",
                versions=(),
                text="",
                failure=f"generation {failure}",
            )
        return Sample(
            sample_id=sample_id,
            group_id=group_id,
            prompt_ids=prompt.token_ids,
            output_ids=generation.output_ids,
            logprobs=generation.logprobs,
            finish_reason=generation.finish_reason,
            versions=generation.versions,
            text=generation.text,
        )
