"""An executor hears of an update when all is ready for it, and again of its end, however that comes about."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from asyncrl.data.fleet import UpdateAck, UpdateLease
from asyncrl.errors import EngineError, WeightUpdateError
from asyncrl.pauses import ToldFleet
from asyncrl.rollout.requests.engine_clock import EngineClock
from asyncrl.rollout.requests.generate_client import GenerateClient
from asyncrl.rollout.requests.retry import RetryPolicy
from tests.contracts.fake_controller import FakeController
from tests.inference.conftest import StartFleet, eventually, start_fleet
from tests.inference.transaction_rig import rig
from tests.scripted import Latency

pytestmark = pytest.mark.anyio
__all__ = ["start_fleet"]  # a fixture


class Clock:
    """What an executor does with it, in short."""

    def __init__(self) -> None:
        self.paused = False
        self.calls: list[str] = []

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        self.calls.append("update")
        try:
            yield
        finally:
            self.calls.append("end of the update")

    def set_weight_version(self, version: str) -> None:
        self.calls.append(version)

    def engines_paused(self) -> None:
        self.paused = True
        self.calls.append("pause")

    def engines_resumed(self) -> None:
        self.paused = False
        self.calls.append("end of the pause")


def told(controller: FakeController) -> tuple[ToldFleet, Clock]:
    clock = Clock()
    return ToldFleet(controller, clock), clock  # type: ignore[arg-type]  # its abort has a default more


def acks(lease: UpdateLease) -> list[UpdateAck]:
    return [UpdateAck(engine.engine_id, engine.generation) for engine in lease.engines]


async def test_an_update_that_is_committed_is_a_pause() -> None:
    fleet, clock = told(FakeController())
    lease = await fleet.begin_weight_update("0.0")
    assert clock.paused
    await fleet.commit_weight_update(lease.lease_id, acks(lease), None)
    assert not clock.paused


@pytest.mark.parametrize("tell", [True, False])
async def test_requests_hear_of_an_update_before_the_pause_and_are_sent_when_their_weights_are_known(
    tell: bool,
) -> None:
    controller, clock = FakeController(), Clock()
    fleet = ToldFleet(controller, clock, tell_version=tell)  # type: ignore[arg-type]  # its abort has a default more
    lease = await fleet.begin_weight_update("0.0")
    await fleet.commit_weight_update(lease.lease_id, acks(lease), None)
    told = (["0.0"] if tell else [], ["0.1"] if tell else [])
    assert clock.calls == ["pause", *told[0], "end of the pause"], "no engine served: no request could end before it"
    clock.calls.clear()
    lease = await fleet.begin_weight_update("0.1")
    assert clock.calls == ["update", "pause"]
    await fleet.commit_weight_update(lease.lease_id, acks(lease), None)
    assert clock.calls == ["update", "pause", *told[1], "end of the pause", "end of the update"]
    clock.calls.clear()
    lease = await fleet.begin_weight_update("0.2")
    await fleet.abort_weight_update(lease.lease_id, {}, untouched=True)
    assert clock.calls == ["update", "pause", "end of the pause", "end of the update"]


async def test_an_update_that_is_given_up_ends_the_pause() -> None:
    fleet, clock = told(FakeController())
    lease = await fleet.begin_weight_update("0.0")
    await fleet.abort_weight_update(lease.lease_id, {}, untouched=True)
    assert not clock.paused
    await fleet.abort_weight_update(lease.lease_id, {}, untouched=True)


async def test_a_commit_that_fails_leaves_the_end_to_the_abort_that_follows() -> None:
    fleet, clock = told(FakeController())
    lease = await fleet.begin_weight_update("0.0")
    with pytest.raises(WeightUpdateError, match="no engine holds them"):
        await fleet.commit_weight_update(lease.lease_id, [], None)
    await fleet.abort_weight_update(lease.lease_id, {}, untouched=False)
    assert not clock.paused


async def test_a_begin_that_fails_is_no_pause() -> None:
    controller = FakeController()
    await controller.dispose()
    fleet, clock = told(controller)
    with pytest.raises(EngineError):
        await fleet.begin_weight_update("0.0")
    assert not clock.paused


@pytest.mark.parametrize("step", ["begin_weight_update", "abort_weight_update"])
async def test_a_step_that_is_cancelled_ends_the_pause(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*args: Any, **how: Any) -> None:
        await anyio.sleep_forever()

    controller = FakeController()
    fleet, clock = told(controller)
    calls: dict[str, Callable[[], Any]] = {
        "begin_weight_update": lambda: fleet.begin_weight_update("0.0"),
        "abort_weight_update": lambda: fleet.abort_weight_update("lease-1", {}, untouched=True),
    }
    if step == "abort_weight_update":
        await fleet.begin_weight_update("0.0")
    monkeypatch.setattr(controller, step, hang)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(calls[step])
        await anyio.wait_all_tasks_blocked()
        assert clock.paused
        tasks.cancel_scope.cancel()
    assert not clock.paused


class Told(Clock):
    """Likewise, with the clock that requests go by."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = EngineClock()

    def engines_paused(self) -> None:
        self.clock.pause()

    def engines_resumed(self) -> None:
        self.clock.resume()


async def test_a_publication_that_takes_longer_than_the_deadline_costs_no_request(start_fleet: StartFleet) -> None:
    timeout_s, tokens, prompt = 3.5, 100_000, msgspec.Raw(b"[1,2]")
    sampling = msgspec.Raw(b'{"max_new_tokens":%d,"temperature":1.0,"ignore_eos":true}' % tokens)
    ended: list[str] = []
    async with rig(start_fleet, latency=Latency(token_s=0.001)) as r:
        r.executor = told = Told()
        await r.publish("0.0")
        client = GenerateClient(
            r.fleet.controller.router_url,
            vocab_size=1 << 20,
            concurrency=8,
            timeout_s=timeout_s,
            policy=RetryPolicy(retries=0, patience_s=1.0),
            clock=told.clock,
        )

        async def one(number: int) -> None:
            ended.append((await client.generate(f"{number:08d}.000", prompt, sampling)).finish_reason)

        async with client, anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(one, number)
            await eventually(lambda: sum(engine.generation.running for engine in r.fleet.engines) == 8)
            r.source.before_tensor = lambda number: time.sleep(1.8 if number in (0, 6) else 0)  # a slow trainer
            report = await r.publish("0.1")
            for engine in r.fleet.engines:
                engine.generation.finish()
        assert report.pause_s > timeout_s
        assert ended == ["length"] * 8 and client.statistics().failed_attempts == {}
        assert told.clock.stood_still_s >= report.pause_s and not told.clock.paused
