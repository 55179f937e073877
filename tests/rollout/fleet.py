"""Scripted engines behind a scripted router, without a controller: what an executor sees of a fleet."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import waiting
from asyncrl.rollout.executor import RolloutExecutor
from tests.scripted import Latency, ScriptedEngine, ScriptedRouter


@dataclass(frozen=True)
class Fleet:
    router: ScriptedRouter
    engines: list[ScriptedEngine]

    @property
    def url(self) -> str:
        return self.router.url

    @property
    def running(self) -> int:
        return sum(engine.generation.running for engine in self.engines)

    @property
    def waiting(self) -> int:
        return sum(engine.generation.waiting for engine in self.engines)

    async def pause(self) -> None:
        for engine in self.engines:
            await engine.generation.pause("retract")

    def go_on(self) -> None:
        for engine in self.engines:
            engine.generation.go_on()


@asynccontextmanager
async def fleet_of(count: int, latency: Latency, **options: Any) -> AsyncIterator[Fleet]:
    """Engines that are known to the router, and have generated nothing; `options` as of ScriptedEngine."""
    router = ScriptedRouter()
    engines = [ScriptedEngine(latency=latency, vocab_size=64, **options) for _ in range(count)]
    async with AsyncExitStack() as running:
        for server in (router, *engines):
            await running.enter_async_context(server.serving())
        router.workers = [engine.url for engine in engines]
        for engine in engines:
            engine.generation.stamp("0.0")
        yield Fleet(router, engines)


async def eventually(satisfied: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Waits for something that no event tells."""
    with anyio.fail_after(timeout_s):
        while True:
            if satisfied():
                return
            await anyio.sleep(0.005)


def deadlines(executor: RolloutExecutor) -> set[float]:
    """Of what the executor has on the wire; infinite while their clock stands still."""
    return {wait.scope.deadline for wait in executor._started.engines.clock._waits}


def let_time_out(executor: RolloutExecutor) -> None:
    """What is on the wire is out of time. The rest had all the time that a busy machine took for it."""
    for wait in executor._started.engines.clock._waits:
        wait.scope.deadline = -math.inf


def hurry(monkeypatch: pytest.MonkeyPatch, module: str, subject: str, timeout_s: float) -> None:
    """Waits of `module` for `subject` end after `timeout_s`. All others keep their deadlines."""

    def hurried(what: str, whom: str, allowed_s: float) -> Any:
        return waiting(what, whom, timeout_s if subject in whom else allowed_s)

    monkeypatch.setattr(f"{module}.waiting", hurried)


def told(events: EventLog, kind: str) -> list[dict[str, Any]]:
    return [dict(line) for line in events.recent if line["kind"] == kind]
