"""A continuous load on a fleet, and an account of what became of every request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np

from asyncrl.rollout.group_events import RequestFailed
from asyncrl.rollout.requests.generate_client import GenerateClient, RequestOptions, Unobserved
from asyncrl.rollout.requests.retry import RetryPolicy
from asyncrl.rollout.requests.wire import Generation, SamplingParams, encode_prompt
from tests.tiny_model import VOCABULARY

TOKENS = 48


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that ended well."""

    sent_at: float
    """When its first attempt was sent (monotonic seconds)."""
    generation: Generation


@dataclass
class Load(Unobserved):
    """What has happened so far; the observer of the client that makes it."""

    answers: list[Answer] = field(default_factory=list)
    attempts: int = 0
    sent_again: list[tuple[float, str]] = field(default_factory=list)
    """When a request was sent once more, and its sample id."""
    failures: list[tuple[float, RequestFailed]] = field(default_factory=list)
    stopping: bool = False

    def failed(self, failure: RequestFailed) -> None:
        self.failures.append((anyio.current_time(), failure))

    async def progress(self, answers: int, timeout_s: float = 60.0) -> None:
        """Returns when so many more requests were answered."""
        goal = len(self.answers) + answers
        with anyio.move_on_after(timeout_s):
            while len(self.answers) < goal:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        last = self.failures[-1][1] if self.failures else "none failed"
        assert len(self.answers) >= goal, f"{self.attempts} attempts, {len(self.answers)} answers; the last: {last}"


class _WatchedClient(GenerateClient):
    """Notes when attempts are sent."""

    load: Load

    async def _attempt(self, rid: str, *request: Any) -> Generation:
        self.load.attempts += 1
        sample_id, attempt = rid.split("-", 1)[1].rsplit(".", 1)
        if attempt != "0000":
            self.load.sent_again.append((anyio.current_time(), sample_id))
        return await super()._attempt(rid, *request)


@asynccontextmanager
async def continuous_load(router_url: str, requests: int) -> AsyncIterator[Load]:
    """Keeps `requests` requests in flight; the end waits for those under way. GenerationFailed of any is raised."""
    load = Load()
    sampling = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, ignore_eos=True)
    random = np.random.default_rng(0)

    options = RequestOptions(
        vocab_size=VOCABULARY,
        timeout_s=120.0,
        retry=RetryPolicy(retries=4, patience_s=120.0),
    )
    async with (
        _WatchedClient(router_url, options, observer=load) as client,
        anyio.create_task_group() as task_group,
    ):
        client.load = load

        async def one(worker: int) -> None:
            number = 0
            while not load.stopping:
                prompt = encode_prompt(random.integers(1, VOCABULARY, 8, dtype=np.int32), VOCABULARY)
                sent_at = anyio.current_time()
                generation = await client.generate(f"w{worker:03d}-{number:06d}", prompt, sampling)
                load.answers.append(Answer(sent_at, generation))
                number += 1

        for worker in range(requests):
            task_group.start_soon(one, worker)
        try:
            yield load
        finally:
            load.stopping = True
