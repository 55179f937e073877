from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.config import Config
from asyncrl.data.fleet import DistrustEngine, PinEvalFleet
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.observability.events import EventLog
from asyncrl.rollout.executor import RolloutExecutor
from asyncrl.rollout.rewards.pool import ProcessHost
from asyncrl.rollout.scheduling.deliveries import TRAINER
from tests.scripted.answers import AnsweringEngine
from tests.tiny_policy import write_policy

StartExecutor = Callable[..., AbstractAsyncContextManager[RolloutExecutor]]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    return PolicyTokenizer.load(write_policy(tmp_path_factory.mktemp("policy")))


@pytest.fixture
def events() -> EventLog:
    return EventLog(None)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": "yes"}) + "\n" for i in range(40)))
    return path


@pytest.fixture
def start_executor(tmp_path: Path, tokenizer: PolicyTokenizer, events: EventLog, prompts: Path) -> StartExecutor:
    """Call with the engine, and sections of the configuration to change."""

    @asynccontextmanager
    async def start(
        engine: AnsweringEngine,
        *,
        host: ProcessHost | None = None,
        trainers: tuple[str, ...] = (TRAINER,),
        name: str = "",
        pin_eval_fleet: PinEvalFleet | None = None,
        distrust: DistrustEngine | None = None,
        **sections: dict[str, Any],
    ) -> AsyncIterator[RolloutExecutor]:
        defaults: dict[str, dict[str, Any]] = {
            "run": {"dir": tmp_path},
            "model": {"path": tmp_path},
            "data": {"source": str(prompts)},
            "rollout": {"prompts_per_step": 3, "samples_per_prompt": 4, "max_new_tokens": 8, "request_timeout_s": 5},
        }
        names = defaults.keys() | sections.keys()
        config = Config(**{name: defaults.get(name, {}) | sections.get(name, {}) for name in names})  # type: ignore[arg-type]
        async with anyio.create_task_group() as task_group:
            executor = RolloutExecutor(
                config,
                router_url=engine.url,
                host=host,
                events=events,
                tokenizer=tokenizer,
                log_dir=tmp_path,
                trainers=trainers,
                name=name,
            )
            try:
                await executor.start(task_group, pin_eval_fleet=pin_eval_fleet, distrust=distrust)
                yield executor
            finally:
                await executor.dispose()

    return start
