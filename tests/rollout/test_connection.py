"""Connection: what `weights.on_update` changes in requests and in what is believed of their answers."""

from __future__ import annotations

import anyio
import pytest

from asyncrl.data.batch import RolloutBatch
from asyncrl.data.sample import VersionSpan
from asyncrl.rollout.executor import RolloutExecutor
from tests.rollout.conftest import StartExecutor
from tests.scripted.answers import Action, AnsweringEngine, scripted_engine

BATCH = 12
STAMPED = (VersionSpan("0.0", 0, 2), VersionSpan("0.1", 2, 4))
"""What an engine says of an answer of four tokens when new weights came after the second."""


def answer_spans(batch: RolloutBatch) -> set[tuple[VersionSpan, ...]]:
    """Which weights made which tokens of the answers, counted in the answer: prompts differ in length."""
    return {tuple(span.moved(-spans[0].start) for span in spans) for spans in batch.versions}


async def around_an_update(engine: AnsweringEngine, executor: RolloutExecutor) -> tuple[RolloutBatch, RolloutBatch]:
    """The batch before an update, whose answers the engine ended under the new weights, and the batch after it."""
    spans = tuple((span.version, span.start, span.end) for span in STAMPED)
    engine.script = lambda request, number: Action((5, 6, 7, 2), versions=spans if number < BATCH else None)
    engine.version = "0.0"
    executor.set_weight_version("0.0")
    before: list[RolloutBatch] = []

    async def first() -> None:
        before.append(await executor.get(0))

    async with anyio.create_task_group() as tasks:
        executor.engines_paused()
        tasks.start_soon(first)
        await engine.until(lambda engine: len(engine.requests) == BATCH and not engine.in_flight)
        engine.version = "0.1"
        executor.set_weight_version("0.1")
        executor.engines_resumed()
    await executor.commit(0)
    async with executor.updating():
        pass
    return before[0], await executor.get(1)


async def test_in_place_requests_share_kv_by_weights_and_a_token_in_flight_counts_with_those_before(
    start_executor: StartExecutor,
) -> None:
    async with scripted_engine() as engine, start_executor(engine, weights={"on_update": "in_place"}) as executor:
        before, after = await around_an_update(engine, executor)
        keys = [request["extra_key"] for request in engine.requests]
    assert len(set(keys[:BATCH])) == len(set(keys[BATCH:])) == 1
    assert keys[0].endswith("-0.0") and keys[BATCH] == keys[0].removesuffix("0.0") + "0.1"
    assert answer_spans(before) == {(VersionSpan("0.0", 0, 3), VersionSpan("0.1", 3, 4))}
    assert answer_spans(after) == {(VersionSpan("0.1", 0, 4),)}


@pytest.mark.parametrize("on_update", ["retract", "wait", "abort"])
async def test_where_no_kv_outlives_an_update_requests_name_no_weights_and_stamps_are_believed(
    start_executor: StartExecutor, on_update: str
) -> None:
    async with scripted_engine() as engine, start_executor(engine, weights={"on_update": on_update}) as executor:
        before, after = await around_an_update(engine, executor)
        assert not any("extra_key" in request for request in engine.requests)
    assert answer_spans(before) == {STAMPED}
    assert answer_spans(after) == {(VersionSpan("0.1", 0, 4),)}
