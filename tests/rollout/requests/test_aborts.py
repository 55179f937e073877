"""Requests that nobody waits for any more end in the engines, and nothing else does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollout.group_events import RequestsAborted
from asyncrl.rollout.requests import aborts as aborts_module
from asyncrl.rollout.requests.aborts import Aborts
from asyncrl.rollout.requests.engine_clock import EngineClock
from asyncrl.rollout.requests.engine_queries import AbortProgress, EngineQueries
from asyncrl.rollout.requests.generate_client import GenerateClient, RequestOptions, Unobserved, request_id
from asyncrl.rollout.requests.retry import MOST_ATTEMPTS, RetryPolicy
from asyncrl.rollout.requests.wire import SamplingParams
from asyncrl.rollout.scheduling.group import Issue
from tests.rollout.fleet import Fleet, eventually, fleet_of, hurry
from tests.scripted import Latency, hang

LONG = SamplingParams(max_new_tokens=5000, temperature=1.0, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=20, temperature=1.0, ignore_eos=True)
PROMPT = msgspec.Raw(b"[1,2]")
SLOW = Latency(token_s=0.005)


@dataclass
class Rig:
    fleet: Fleet
    client: GenerateClient
    aborts: Aborts
    control: EngineQueries
    clock: EngineClock
    told: list[RequestsAborted]

    async def long(self, sample_id: str) -> None:
        await self.client.generate(sample_id, PROMPT, LONG)


@dataclass
class GivenUp(Unobserved):
    aborts: Aborts

    def given_up(self, rid: str, reason: str) -> None:
        self.aborts.add(rid, reason)


@asynccontextmanager
async def rig(engines: int = 2, *, timeout_s: float = 20.0) -> AsyncIterator[Rig]:
    told: list[RequestsAborted] = []
    async with fleet_of(engines, SLOW) as fleet, anyio.create_task_group() as tasks:
        control, clock = EngineQueries(fleet.url), EngineClock()
        aborts = Aborts(control, clock, on_sent=told.append)
        tasks.start_soon(aborts.serve)
        async with GenerateClient(
            fleet.url,
            RequestOptions(
                vocab_size=64,
                timeout_s=timeout_s,
                retry=RetryPolicy(retries=1, patience_s=5.0, first_delay_s=0.01),
            ),
            observer=GivenUp(aborts),
            clock=clock,
        ) as client:
            try:
                yield Rig(fleet, client, aborts, control, clock, told)
            finally:
                await aborts.aclose()


async def test_what_is_cancelled_ends_in_its_engine_and_the_rest_goes_on() -> None:
    async with rig() as r, anyio.create_task_group() as kept:
        for index in range(2):
            kept.start_soon(r.long, f"00000000.{index:03d}")
        async with anyio.create_task_group() as cancelled:
            for index in range(4):
                cancelled.start_soon(r.long, f"00000001.{index:03d}")
            await eventually(lambda: r.fleet.running == 6)
            cancelled.cancel_scope.cancel()
        await eventually(lambda: r.fleet.running == 2)
        await eventually(lambda: len(r.told) == 1)
        [told] = r.told
        assert (told.requests, told.engines, told.heard, told.reasons) == (4, 2, 2, {"cancelled": 4})
        assert r.aborts.requests == 4
        assert r.fleet.engines[0].calls.count("abort_request") == r.fleet.engines[1].calls.count("abort_request") == 4
        kept.cancel_scope.cancel()


async def test_a_request_that_is_not_answered_in_time_ends_in_its_engine_and_is_sent_again() -> None:
    async with rig(engines=1, timeout_s=0.3) as r:
        with pytest.raises(Exception, match="timed_out"):
            await r.long("00000000.000")
        await eventually(lambda: r.fleet.running == 0 and r.aborts.requests == 2)
        assert sum(told.requests for told in r.told) == 2 and r.told[0].reasons.keys() == {"timed_out"}


async def test_while_engines_are_paused_nothing_is_told_and_afterwards_all_is() -> None:
    async with rig() as r:
        await r.fleet.pause()
        r.clock.pause()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(r.long, "00000000.000")
            await eventually(lambda: r.fleet.waiting == 1)
            tasks.cancel_scope.cancel()
        await anyio.sleep(2 * aborts_module.GATHER_S)
        assert r.told == [] and "abort_request" not in r.fleet.engines[0].calls
        r.fleet.go_on()
        r.clock.resume()
        await eventually(lambda: r.fleet.running + r.fleet.waiting == 0 and len(r.told) == 1)
        assert r.aborts.requests == 1


async def test_an_abort_that_comes_in_a_pause_is_used_up_without_effect() -> None:
    """The trap that the test above avoids, as the real engine has it."""
    async with rig(engines=1) as r:
        [engine] = r.fleet.engines
        await r.fleet.pause()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(r.client.generate, "00000000.000", PROMPT, SHORT)
            await eventually(lambda: r.fleet.waiting == 1)
            rids = sorted(r.client.on_the_wire)
            await r.control.abort(rids, AbortProgress())
            r.fleet.go_on()
            await eventually(lambda: r.fleet.running == 1)
            await r.control.abort(rids, AbortProgress())
        assert len(engine.generation.makers[rids[0]]) == 20, "it ran to its end"


async def test_ids_that_no_engine_knows_disturb_nobody() -> None:
    async with rig() as r, anyio.create_task_group() as tasks:
        tasks.start_soon(r.long, "00000000.000")
        await eventually(lambda: r.fleet.running == 1)
        [rid] = r.client.on_the_wire
        await r.control.abort([rid[:-1], rid + "0", "unknown"], told := AbortProgress())
        assert told == AbortProgress(engines=2, heard=2)
        await anyio.sleep(0.05)
        assert r.fleet.running == 1
        tasks.cancel_scope.cancel()


async def test_an_engine_that_is_silent_delays_and_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as r:
        hurry(monkeypatch, "asyncrl.rollout.requests.engine_queries", r.fleet.engines[0].url, 0.3)
        r.fleet.engines[0].script(hang("abort_request", times=None))
        async with anyio.create_task_group() as tasks:
            for index in range(6):
                tasks.start_soon(r.long, f"00000000.{index:03d}")
            await eventually(lambda: r.fleet.running == 6)
            tasks.cancel_scope.cancel()
        await eventually(lambda: len(r.told) == 1)
        assert (r.told[0].engines, r.told[0].heard) == (2, 1)
        assert r.fleet.engines[1].generation.running == 0


async def test_a_telling_that_is_cut_off_says_who_heard_until_then() -> None:
    async with rig() as r:
        r.fleet.engines[0].script(hang("abort_request", times=None))
        for index in range(3):
            r.aborts.add(f"unknown-{index}", "cancelled")
        await r.aborts.send(0.5)
        assert [(told.requests, told.engines, told.heard) for told in r.told] == [(3, 2, 1)]


async def test_a_router_that_is_down_hides_no_engine() -> None:
    async with rig() as r:
        await r.control.engines()
        async with anyio.create_task_group() as tasks:
            for index in range(4):
                tasks.start_soon(r.long, f"00000000.{index:03d}")
            await eventually(lambda: r.fleet.running == 4)
            r.fleet.router.kill()
            tasks.cancel_scope.cancel()
        await eventually(lambda: len(r.told) == 1)
        assert r.told[0].heard == 2


async def test_the_end_tells_what_is_left_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aborts_module, "CLOSE_TIMEOUT_S", 0.5)
    async with rig() as r:
        r.fleet.engines[0].script(hang("abort_request", times=None))
        async with anyio.create_task_group() as tasks:
            for index in range(6):
                tasks.start_soon(r.long, f"00000000.{index:03d}")
            await eventually(lambda: r.fleet.running == 6)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(10):
            await r.aborts.aclose()
        await eventually(lambda: r.fleet.engines[1].generation.running == 0, timeout_s=1.0)
        assert sum(told.requests for told in r.told) == 6
        r.aborts.add("too late", "cancelled")
        await r.aborts.aclose()
        assert sum(told.requests for told in r.told) == 6


# ids


@st.composite
def sample_ids(draw: st.DrawFn) -> str:
    index = draw(st.integers(0, 9999))
    if draw(st.booleans()):
        again = draw(st.sampled_from(["", "r1", "r12"]))
        return f"e{draw(st.integers(0, 10**8)):07d}{again}.{draw(st.integers(0, 10**8)):07d}.{index:03d}"
    issue = Issue(draw(st.integers(0, 10**9)), None, 0, draw(st.integers(0, 200)))  # type: ignore[arg-type]
    return f"{issue.group_id}.{index:03d}"


@given(
    st.sets(sample_ids(), min_size=1, max_size=10),
    st.sets(st.tuples(st.integers(0, 300), st.integers(0, MOST_ATTEMPTS - 1)), min_size=2, max_size=10),
)
def test_no_id_begins_another(samples: set[str], attempts: set[tuple[int, int]]) -> None:
    rids = [request_id("0123abcd", sample_id, *attempt) for sample_id in samples for attempt in attempts]
    assert not [(one, other) for one in rids for other in rids if one != other and other.startswith(one)]
