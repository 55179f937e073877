"""Trainer and engine agree: on log-probs of sampled tokens, and on greedy tokens after every publication.

One real trainer rank publishes to the shared fleet and trains on what the fleet samples.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

from asyncrl.config import Config
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.inference.sglang.engine_api import EngineApi
from asyncrl.rollout.executor import RolloutExecutor
from asyncrl.training.train_group import Publishing, TrainGroup
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.transports import make_transport
from tests.system.conftest import RealFleet, started_fleet

pytestmark = [pytest.mark.anyio, pytest.mark.system, pytest.mark.timeout(450)]

GREEDY_PROMPTS = [[3 + (7 * i + 5 * j) % 60 for j in range(4 + i)] for i in range(8)]
GREEDY_TOKENS = 32
NEAR_TIE = 1e-4


def spread_reward(sample: Any, prompt: Any) -> float:
    """Differs within a group, so that every step moves the weights."""
    return float(len(set(sample.output_ids.tolist())))


@asynccontextmanager
async def executor_at(fleet: RealFleet, config: Config) -> AsyncIterator[RolloutExecutor]:
    executor = RolloutExecutor(
        config,
        router_url=fleet.controller.router_url,
        host=fleet.host,
        events=fleet.events,
        tokenizer=PolicyTokenizer.load(config.model.path),
        log_dir=fleet.run_dir / "logs",
    )
    async with anyio.create_task_group() as tasks:
        await executor.start(tasks)
        try:
            yield executor
        finally:
            await executor.dispose()


def config_at(fleet: RealFleet, data: Path, temperature: float) -> Config:
    return fleet.config.model_copy(
        update={
            name: getattr(fleet.config, name).model_validate({**getattr(fleet.config, name).model_dump(), **changes})
            for name, changes in {
                "data": {"source": str(data), "chat_template": False, "answer_key": None},
                "rollout": {
                    "prompts_per_step": 4,
                    "samples_per_prompt": 4,
                    "max_new_tokens": 48,
                    "temperature": temperature,
                },
                "reward": {"function": f"{__name__}:spread_reward", "workers": 0},
                "train": {"lr": 1e-3},
            }.items()
        }
    )


async def greedy_of_engines(fleet: RealFleet) -> dict[str, list[list[int]]]:
    answers: dict[str, list[list[int]]] = {}
    for status in fleet.controller.fleet().engines:
        async with EngineApi.open(status.endpoint.engine_id, status.endpoint.url) as client:
            answers[status.endpoint.engine_id] = [
                list((await client.generate(prompt, max_new_tokens=GREEDY_TOKENS)).output_ids)
                for prompt in GREEDY_PROMPTS
            ]
    return answers


def assert_greedy_equals_export(answers: list[list[int]], export: Path) -> None:
    """Each token is the export's argmax, given what came before it; near ties are excepted."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    for prompt, answer in zip(GREEDY_PROMPTS, answers, strict=True):
        assert len(answer) == GREEDY_TOKENS
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([prompt + answer])).logits[0].float(), -1)
        predicted = logprobs[len(prompt) - 1 : -1]
        gap = predicted.max(-1).values - predicted[torch.arange(GREEDY_TOKENS), torch.tensor(answer)]
        assert gap.max() < NEAR_TIE, f"an engine left the export's greedy path by {gap.max():.2e} nat"


async def check_agreement(fleet: RealFleet, directory: Path, temperatures: tuple[float, ...]) -> None:
    """Publishes, samples and trains at each temperature in turn, and compares after every step."""
    data = directory / "prompts.jsonl"
    data.write_text("".join(f'{{"prompt": "count {i} and on"}}\n' for i in range(64)))
    base = config_at(fleet, data, 1.0)
    async with anyio.create_task_group() as tasks:
        make_publisher = partial(
            Publisher,
            fleet.controller,
            transport=make_transport(base, "broadcast", open_engine=EngineApi.open),
            events=fleet.events,
        )
        publishing = Publishing(make_publisher, version_of=lambda step: f"{fleet.events.attempt}.{step}")
        trainer = TrainGroup(base, task_group=tasks, events=fleet.events, publishing=publishing)
        try:
            await trainer.init()
            await trainer.update_weights()
            before = (await greedy_of_engines(fleet))["engine-0"]
            for rollout_id, temperature in enumerate(temperatures):
                async with executor_at(fleet, config_at(fleet, data, temperature)) as executor:
                    batch = await executor.get(rollout_id)
                assert batch.temperature == temperature
                assert -executor.last_rollout.logprob_mean > 0.5  # an estimate of the entropy, nat per token
                metrics = await trainer.train(rollout_id, batch)
                assert metrics["train/logprob_diff_mean"] < 1e-4
                assert metrics["train/logprob_diff_max"] < 1e-3
                await trainer.update_weights(rollout_id)

                export = directory / f"export-{rollout_id}"
                await trainer.export_hf(export)
                answers = await greedy_of_engines(fleet)
                for answer in answers.values():
                    await anyio.to_thread.run_sync(assert_greedy_equals_export, answer, export)
            assert answers["engine-0"] != before  # training did move the weights
        finally:
            await trainer.dispose()
            tasks.cancel_scope.cancel()


async def test_engine_and_trainer_agree_at_every_temperature_and_after_every_publication(
    serving_fleet: RealFleet, tmp_path: Path
) -> None:
    await check_agreement(serving_fleet, tmp_path, (0.7, 1.0, 1.3))


@pytest.mark.long
async def test_a_tensor_parallel_engine_agrees_with_the_trainer(
    anyio_backend: object, tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    async with started_fleet(tiny_models, tmp_path, tensor_parallel=2) as fleet:
        await check_agreement(fleet, tmp_path, (1.0,))
