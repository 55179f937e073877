"""Executors hear of a pause when it begins, and of its end however that comes about; and which weights follow it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from asyncrl.data.fleet import UpdateAck, UpdateLease
from asyncrl.errors import EngineError, WeightUpdateError
from asyncrl.rollout.requests.engine_clock import EngineClock
from asyncrl.rollout.requests.generate_client import GenerateClient, RequestOptions
from asyncrl.rollout.requests.retry import RetryPolicy
from asyncrl.rollout.requests.wire import SamplingParams
from asyncrl.run.pauses import Pauses, ToldFleet
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
    pauses, clock = Pauses(), Clock()
    pauses.add(clock)
    return ToldFleet(controller, pauses), clock


def acks(lease: UpdateLease) -> list[UpdateAck]:
    return [UpdateAck(engine.engine_id, engine.generation) for engine in lease.engines]


async def test_an_update_that_is_committed_is_a_pause() -> None:
    fleet, clock = told(FakeController())
    lease = await fleet.begin_weight_update("0.0")
    assert clock.paused
    await fleet.commit_weight_update(lease.lease_id, acks(lease), None)
    assert not clock.paused


async def test_requests_hear_of_an_update_before_the_pause_and_are_sent_when_their_weights_are_known() -> None:
    fleet, clock = told(FakeController())
    lease = await fleet.begin_weight_update("0.0")
    await fleet.commit_weight_update(lease.lease_id, acks(lease), None)
    assert clock.calls == ["pause", "0.0", "end of the pause"], "no engine served: no request could end before it"
    clock.calls.clear()
    lease = await fleet.begin_weight_update("0.1")
    assert clock.calls == ["update", "pause"]
    await fleet.commit_weight_update(lease.lease_id, acks(lease), None)
    assert clock.calls == ["update", "pause", "0.1", "end of the pause", "end of the update"]
    clock.calls.clear()
    lease = await fleet.begin_weight_update("0.2")
    await fleet.abort_weight_update(lease.lease_id, {}, untouched=True)
    assert clock.calls == ["update", "pause", "end of the pause", "end of the update"]


async def test_pauses_that_overlap_are_one_and_weights_are_told_at_its_end() -> None:
    """As on shared GPUs: weights that arrive in the trainer's turn are not served before engines have their memory."""
    pauses, clock = Pauses(), Clock()
    pauses.add(clock)
    fleet = ToldFleet(FakeController(), pauses)
    turn = pauses.begin("a turn")
    lease = await fleet.begin_weight_update("0.0")
    assert pauses.reasons == ("a turn", "update of the weights")
    await fleet.commit_weight_update(lease.lease_id, acks(lease), None)
    assert clock.calls == ["pause"]
    turn.end()
    turn.end()
    assert clock.calls == ["pause", "0.0", "end of the pause"] and pauses.reasons == ()


async def test_a_turn_that_ends_within_an_update_leaves_the_pause_to_it() -> None:
    pauses, clock = Pauses(), Clock()
    pauses.add(clock)
    turn = pauses.begin("a turn")
    async with pauses.update(requests_end=False):
        turn.end()
        assert clock.paused
    assert not clock.paused


async def test_an_executor_that_comes_in_a_pause_hears_of_it_and_of_the_weights_that_engines_held() -> None:
    pauses, first, second = Pauses(), Clock(), Clock()
    pauses.add(first)
    pauses.serve("0.0")
    async with pauses.update(requests_end=True):
        pauses.add(second)
        pauses.serve("0.1")
    assert first.calls == ["0.0", "update", "pause", "0.1", "end of the pause", "end of the update"]
    assert second.calls == ["0.0", "pause", "0.1", "end of the pause"]


async def test_two_executors_in_front_of_the_same_engines_end_their_requests_for_an_update_at_the_same_time() -> None:
    """Their waits do not add up, and the pause begins when both are ready."""
    pauses, first, second = Pauses(), Clock(), Clock()
    begun: list[Clock] = []

    def waits_for(clock: Clock, other: Clock) -> Callable[[], AbstractAsyncContextManager[None]]:
        @asynccontextmanager
        async def updating() -> AsyncIterator[None]:
            begun.append(clock)
            with anyio.fail_after(20):
                while other not in begun:
                    await anyio.lowlevel.checkpoint()
            clock.calls.append("update")
            yield

        return updating

    first.updating = waits_for(first, second)  # type: ignore[method-assign]
    second.updating = waits_for(second, first)  # type: ignore[method-assign]
    pauses.add(first)
    pauses.add(second)
    async with pauses.update(requests_end=True):
        pass
    assert first.calls == second.calls == ["update", "pause", "end of the pause"]


async def test_an_executor_that_cannot_end_its_requests_leaves_no_other_in_an_update() -> None:
    pauses, first, second = Pauses(), Clock(), Clock()

    @asynccontextmanager
    async def fails() -> AsyncIterator[None]:
        await anyio.wait_all_tasks_blocked()
        raise EngineError("its connection is closed")
        yield

    second.updating = fails  # type: ignore[method-assign]
    pauses.add(first)
    pauses.add(second)
    with pytest.raises(EngineError, match="its connection is closed"):
        async with pauses.update(requests_end=True):
            pass
    assert first.calls == ["update", "end of the update"] and pauses.reasons == ()


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


async def test_two_executors_in_front_of_the_same_engines_both_hear_of_a_publication(start_fleet: StartFleet) -> None:
    async with rig(start_fleet) as r:
        first, second = Clock(), Clock()
        r.pauses.add(first)
        await r.publish("0.0")
        r.pauses.add(second)
        await r.publish("0.1")
        heard = ["update", "pause", "0.1", "end of the pause", "end of the update"]
        assert first.calls == ["pause", "0.0", "end of the pause", *heard]
        assert second.calls == ["0.0", *heard]


async def test_a_publication_that_takes_longer_than_the_deadline_costs_no_request(start_fleet: StartFleet) -> None:
    timeout_s, tokens, prompt = 3.5, 100_000, msgspec.Raw(b"[1,2]")
    sampling = SamplingParams(max_new_tokens=tokens, temperature=1.0, ignore_eos=True)
    ended: list[str] = []
    async with rig(start_fleet, latency=Latency(token_s=0.001)) as r:
        r.pauses.add(told := Told())
        await r.publish("0.0")
        client = GenerateClient(
            r.fleet.controller.router_url,
            RequestOptions(
                vocab_size=1 << 20,
                timeout_s=timeout_s,
                retry=RetryPolicy(retries=0, patience_s=1.0),
            ),
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
