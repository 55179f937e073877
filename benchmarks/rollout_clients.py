"""Three clients that keep an engine busy, for benchmarks/rollout_throughput.py: a bare loop, httpx, and ours.

All send the same prompts with the same sampling. The bare loop decodes answers to typed Python objects (text, ids,
triples of log-prob, id and text, metadata) and does nothing with them. The httpx client works as in most projects of
this field: one client whose connection limit is the concurrency, `json()`, lists taken from the dictionaries. Ours is
the whole executor, up to committed batches of tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import httpx
import msgspec

from asyncrl.config import Config
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.observability.events import EventLog
from asyncrl.rollout.executor import RolloutExecutor

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """The load on the engine."""

    url: str
    in_flight: int
    groups: int
    """Prompts in a batch."""
    samples: int
    """Samples of each prompt."""
    max_new_tokens: int
    prompts: Path
    """File of JSON lines with a field `prompt`."""
    tokenizer: PolicyTokenizer
    work: Path
    """Directory for the files that a client writes."""
    ahead: int = 0
    """Batches that the executor generates ahead of the requested one. The other clients never stop to generate."""

    @property
    def batch(self) -> int:
        """Samples in a batch."""
        return self.groups * self.samples

    def request(self, number: int, token_ids: list[int]) -> dict[str, Any]:
        """Returns the body of one request."""
        return {
            "rid": f"bench-{number:08d}",
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": self.max_new_tokens, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "stream": False,
        }

    def token_ids(self) -> Iterator[list[int]]:
        """Yields the ids of the prompts in turn, each `samples` times, without end."""
        lines = [msgspec.json.decode(line)["prompt"] for line in self.prompts.read_bytes().splitlines()]
        encoded = [ids.tolist() for ids in self.tokenizer.encode(lines, add_special_tokens=False)]
        for ids in itertools.cycle(encoded):
            yield from itertools.repeat(ids, self.samples)


Run = Callable[[Callable[[int], None], int | None], Awaitable[None]]
"""Generates a number of batches (None: without end); calls its first argument with the number of samples just done."""
Client = Callable[[Load], AbstractAsyncContextManager[Run]]


def in_slots(load: Load, sample: Callable[[dict[str, Any]], Awaitable[None]]) -> Run:
    """Runs `sample` in `load.in_flight` tasks; each task begins its next sample when it has finished one."""
    token_ids = load.token_ids()

    async def run(done: Callable[[int], None], batches: int | None) -> None:
        numbers = itertools.count() if batches is None else iter(range(batches * load.batch))

        async def slot() -> None:
            for number in numbers:
                await sample(load.request(number, next(token_ids)))
                done(1)

        async with anyio.create_task_group() as tasks:
            for _ in range(load.in_flight):
                tasks.start_soon(slot)

    return run


class _Meta(msgspec.Struct):
    id: str
    finish_reason: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int
    output_token_logprobs: list[tuple[float, int, str | None]]
    weight_version: str
    cached_tokens: int


class _Answer(msgspec.Struct):
    text: str
    output_ids: list[int]
    meta_info: _Meta


@asynccontextmanager
async def bare(load: Load) -> AsyncIterator[Run]:
    """The bare loop: aiohttp and a typed msgspec decoder."""
    decoder = msgspec.json.Decoder(_Answer)
    url, headers = f"{load.url}/generate", {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=load.in_flight)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:

        async def sample(request: dict[str, Any]) -> None:
            async with session.post(url, data=msgspec.json.encode(request), headers=headers) as response:
                decoder.decode(await response.read())

        yield in_slots(load, sample)


@asynccontextmanager
async def usual_httpx(load: Load) -> AsyncIterator[Run]:
    """httpx, as most projects of this field use it."""
    limits = httpx.Limits(max_connections=load.in_flight, max_keepalive_connections=load.in_flight)
    async with httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(TIMEOUT_S)) as client:

        async def sample(request: dict[str, Any]) -> None:
            response = await client.post(f"{load.url}/generate", json=request)
            response.raise_for_status()
            answer = response.json()
            triples = answer["meta_info"]["output_token_logprobs"]
            answer["tokens"] = [item[1] for item in triples]
            answer["logprobs"] = [item[0] for item in triples]

        yield in_slots(load, sample)


@asynccontextmanager
async def executor(load: Load) -> AsyncIterator[Run]:
    """asyncrl's executor, with its event log in a file; every sample passes through all of its parts."""
    config = Config.model_validate(
        {
            "model": {"path": load.tokenizer.source},
            "data": {"source": str(load.prompts), "chat_template": False, "shuffle": False},
            "reward": {"function": "length", "args": {"target": load.max_new_tokens}, "workers": 0},
            "rollout": {
                "prompts_per_step": load.groups,
                "samples_per_prompt": load.samples,
                "max_new_tokens": load.max_new_tokens,
                "ignore_eos": True,
                "concurrency": load.in_flight,
                "max_staleness": load.ahead,
                "request_timeout_s": TIMEOUT_S,
            },
        }
    )
    async with anyio.create_task_group() as tasks:
        events = EventLog(load.work / "events.jsonl")
        rollouts = RolloutExecutor(
            config, router_url=load.url, host=None, events=events, tokenizer=load.tokenizer, log_dir=load.work
        )
        await rollouts.start(tasks)
        steps = itertools.count()
        if load.ahead:
            rollouts.generate_ahead(0, 1 << 30)

        async def run(done: Callable[[int], None], batches: int | None) -> None:
            for step in steps if batches is None else itertools.islice(steps, batches):
                batch = await rollouts.get(step)
                await rollouts.commit(step)
                done(batch.num_samples)

        try:
            yield run
        finally:
            await rollouts.dispose()
            events.close()


CLIENTS: dict[str, Client] = {"bare aiohttp + msgspec": bare, "executor": executor, "httpx": usual_httpx}
