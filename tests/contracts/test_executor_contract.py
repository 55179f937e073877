"""What a loop may rely on from an executor: real (over a scripted engine) and fake alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import torch

from asyncrl.errors import RolloutError
from asyncrl.observability.events import EventLog
from tests.contracts.fake_executor import FakeExecutor
from tests.rollout.conftest import StartExecutor, anyio_backend, events, prompts, start_executor, tokenizer
from tests.scripted.answers import scripted_engine

pytestmark = pytest.mark.anyio
__all__ = ["anyio_backend", "events", "prompts", "start_executor", "tokenizer"]  # fixtures

Start = Callable[[], AbstractAsyncContextManager[Any]]


@pytest.fixture(params=["fake", "real"])
def start(request: pytest.FixtureRequest, start_executor: StartExecutor, events: EventLog) -> Start:
    @asynccontextmanager
    async def fake() -> AsyncIterator[FakeExecutor]:
        executor = FakeExecutor(prompts_per_step=3, samples_per_prompt=4)
        yield executor
        await executor.dispose()

    @asynccontextmanager
    async def real() -> AsyncIterator[Any]:
        async with scripted_engine() as engine, start_executor(engine) as executor:
            engine.version = "0.0"
            yield executor

    return fake if request.param == "fake" else real


async def test_a_batch_is_whole_and_its_parts_fit_together(start: Start) -> None:
    async with start() as executor:
        executor.set_weight_version("0.0")
        batch = await executor.get(0)
        assert batch.rollout_id == 0
        assert batch.num_samples == 12 and len(batch.group_ids) == 3 and len(set(batch.sample_ids)) == 12
        assert int(batch.sequence_lengths.sum()) == len(batch.tokens)
        assert len(batch.logprobs) == len(batch.loss_mask) == len(batch.sampled) == len(batch.tokens)
        assert torch.equal(batch.group_index.bincount(), torch.tensor([4, 4, 4]))
        lengths = zip(batch.sequence_lengths.tolist(), batch.sampled_lengths.tolist(), strict=True)
        for spans, (length, sampled) in zip(batch.versions, lengths, strict=True):
            assert spans[0].start == length - sampled and spans[-1].end == length


async def test_no_group_is_delivered_twice(start: Start) -> None:
    async with start() as executor:
        seen: set[str] = set()
        for rollout_id in range(3):
            batch = await executor.get(rollout_id)
            assert seen.isdisjoint(batch.group_ids)
            seen |= set(batch.group_ids)
            await executor.commit(rollout_id)
        assert len(seen) == 9


async def test_each_rollout_is_got_once_and_committed_once_after_that(start: Start) -> None:
    async with start() as executor:
        with pytest.raises(RolloutError, match="commit each rollout id once, after get"):
            await executor.commit(0)
        await executor.get(0)
        with pytest.raises(RolloutError, match="get each rollout id once"):
            await executor.get(0)
        await executor.commit(0)
        with pytest.raises(RolloutError):
            await executor.commit(0)
        with pytest.raises(RolloutError):
            await executor.get(0)


async def test_an_evaluation_that_cannot_be_made_is_a_point_with_a_reason(start: Start) -> None:
    async with start() as executor:
        report = executor.report_eval_skip(3, "the fleet is away")
        assert (report.rollout_id, report.accuracy, report.skipped) == (3, None, "the fleet is away")
        assert report.as_dict() == {}
        assert (await executor.eval(4)).rollout_id == 4


async def test_a_disposed_executor_delivers_nothing(start: Start) -> None:
    async with start() as executor:
        await executor.get(0)
        await executor.dispose()
        await executor.dispose()
        with pytest.raises(RolloutError):
            await executor.get(1)


async def test_generation_ahead_loses_and_repeats_nothing(start: Start) -> None:
    async with start() as executor:
        executor.generate_ahead(0, 3)
        seen: list[str] = []
        for rollout_id in range(3):
            seen += (await executor.get(rollout_id)).group_ids
            await executor.commit(rollout_id)
            async with executor.updating():
                pass
        assert len(seen) == len(set(seen)) == 9


async def test_what_was_saved_between_two_batches_goes_on_in_another_executor(start: Start) -> None:
    async with start() as executor:
        await executor.get(0)
        with pytest.raises(RolloutError, match="rollout 0 was delivered and not committed"):
            await executor.save()
        await executor.commit(0)
        files = await executor.save()
    async with start() as executor:
        await executor.restore(files, 1)
        assert (await executor.get(1)).group_ids == ("00000003", "00000004", "00000005")
        await executor.commit(1)
