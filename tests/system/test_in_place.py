"""Weights that change under requests which keep their KV: what the real engine does with tokens, stamps and caches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.data.sample import VersionSpan
from asyncrl.inference.sglang.engine_api import EngineApi
from asyncrl.rollout.requests.wire import attribute_steps_in_flight
from asyncrl.weights.transports.broadcast import BroadcastTransport
from tests.system.conftest import RealFleet
from tests.system.test_update_under_load import (
    EXACT,
    OTHER_WEIGHTS,
    SMALL_BUCKET,
    UNDER_WAY,
    Generation,
    engine_url,
    hold,
    logprobs_of_transformers,
    numbered_prompt,
    publish_to,
)
from tests.weights.fakes import ThreadSource

pytestmark = [pytest.mark.anyio, pytest.mark.system, pytest.mark.timeout(450)]


@pytest.fixture
async def trainer(serving_fleet: RealFleet) -> AsyncIterator[ThreadSource]:
    """It holds the second model."""
    trainer = ThreadSource(load_file(serving_fleet.models[1] / "model.safetensors"))
    yield trainer
    trainer.close()


@pytest.fixture
async def in_place(
    serving_fleet: RealFleet, trainer: ThreadSource, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[BroadcastTransport]:
    """The shared fleet is paused in place for the time of a test; the transport that goes with that."""
    updates = serving_fleet.controller._started.updates
    monkeypatch.setattr(updates, "_config", updates._config.model_copy(update={"on_update": "in_place"}))
    transport = BroadcastTransport(
        EngineApi.open, backend="gloo", bucket_bytes=SMALL_BUCKET, timeout_s=10.0, flush_cache=False
    )
    yield transport
    await transport.aclose()


async def off(model: Path, generation: Generation) -> Tensor:
    """float32 [tokens]: by how much each log-prob misses that of `model`, in nat."""
    return (generation.logprobs - await anyio.to_thread.run_sync(logprobs_of_transformers, model, generation)).abs()


async def test_running_requests_keep_their_kv_and_new_ones_see_none_of_it(
    serving_fleet: RealFleet, trainer: ThreadSource, in_place: BroadcastTransport
) -> None:
    fleet, url = serving_fleet, engine_url(serving_fleet)
    old, new = str(fleet.controller.fleet().published_version), fleet.next_version()
    running = [
        Generation(numbered_prompt(40 + i, length), tokens, temperature, extra_key=old)
        for i, (length, tokens, temperature) in enumerate([(3, 480, 1.0), (17, 460, 0.7), (64, 420, 1.3)])
    ]
    shared = numbered_prompt(50, 48)
    before, after = (Generation(shared, 40, 1.0, extra_key=version) for version in (old, new))
    stale = Generation(shared, 40, 1.0, extra_key=old)
    prefixes: list[list[int]] = []

    async def during_the_pause() -> None:
        prefixes.extend(generation.output for generation in running)

    with anyio.fail_after(60):
        await before.run(url)
        async with anyio.create_task_group() as requests:
            for generation in running:
                requests.start_soon(generation.run, url)
            async with anyio.create_task_group() as waiters:
                for generation in running:
                    waiters.start_soon(generation.next_tokens, UNDER_WAY)
            hold(trainer, during_the_pause)
            await publish_to(fleet, trainer, in_place, new)
        await after.run(url)
        await stale.run(url)

    for generation, prefix in zip(running, prefixes, strict=True):
        assert generation.answer["meta_info"]["num_retractions"] == 0
        assert generation.output[: len(prefix)] == prefix and len(generation.output) == generation.tokens
        assert [version for version, _, _ in generation.spans] == [old, new], "and never torn"
        stamped = generation.spans[1][1]
        spans = attribute_steps_in_flight([VersionSpan(*span) for span in generation.spans], old)
        assert spans == (VersionSpan(old, 0, stamped + 1), VersionSpan(new, stamped + 1, generation.tokens))
        from_old, from_new = await off(fleet.models[0], generation), await off(fleet.models[1], generation)
        assert from_old[:stamped].max() < EXACT, "and the token after these, where a step was in flight"
        assert from_old[stamped + 1 :].mean() > OTHER_WEIGHTS and from_new[stamped + 1 :].mean() > EXACT, "approximate"

    assert [g.answer["meta_info"]["cached_tokens"] for g in (before, after, stale)] == [0, 0, len(shared) - 1]
    assert (await off(fleet.models[0], before)).max() < EXACT
    assert (await off(fleet.models[1], after)).max() < EXACT
    assert (await off(fleet.models[1], stale)).mean() > EXACT, "why requests carry the version that they begin under"
