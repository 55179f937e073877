"""Engines on the trainer's GPUs over a whole step: memory goes and comes in turns, weights arrive in between."""

from __future__ import annotations

import anyio
import pytest

from asyncrl.data.fleet import EngineState
from tests.inference.conftest import Fleet, StartFleet, eventually
from tests.inference.updates.test_weight_updates import acks, deliver

pytestmark = pytest.mark.anyio


async def publish(fleet: Fleet, version: str) -> None:
    """As `phases.publish` does it."""
    controller = fleet.controller
    await controller.onload_weights()
    lease = await controller.begin_weight_update(version)
    deliver(fleet, version)
    await controller.commit_weight_update(lease.lease_id, acks(lease))
    await controller.onload_kv()


@pytest.mark.parametrize("peak", ["gpu", "cpu"])
async def test_colocated_engines_serve_after_each_publication_and_rest_in_between(
    start_fleet: StartFleet, peak: str
) -> None:
    async with start_fleet(2, colocated=True) as fleet:
        controller = fleet.controller
        await controller.wait_ready()
        await (controller.offload_kv() if peak == "gpu" else controller.offload())
        for version in ("0.0", "0.1", "0.2"):
            await publish(fleet, version)
            with anyio.fail_after(5):
                await controller.prepare_rollout(0)
            assert [(s.state, s.version) for s in controller.fleet().engines] == [(EngineState.SERVING, version)] * 2
            await eventually(lambda: len(fleet.router.workers) == 2)
            assert not any(engine.paused or engine.session or engine.offloaded for engine in fleet.engines)
            generation = await controller._started.actor.routing.router.probe(version)
            assert len(generation.output_ids) == 1
            await controller.offload()
            assert all(engine.offloaded == {"kv_cache", "cuda_graph", "weights"} for engine in fleet.engines)
    assert fleet.failures == []
