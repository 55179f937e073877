from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import msgspec
import pytest
from blockbuster import blockbuster_ctx
from structlog.testing import capture_logs

from asyncrl.data.sample import VersionSpan
from asyncrl.observability.events import Event
from asyncrl.observability.waits import WAITS
from asyncrl.rollout import group_events as rollout_events
from asyncrl.rollout.group_events import RequestFailed
from asyncrl.rollout.requests.answers import Defect
from asyncrl.rollout.requests.engine_clock import EngineClock
from asyncrl.rollout.requests.generate_client import GenerateClient, GenerationFailed, RequestOptions, Unobserved
from asyncrl.rollout.requests.retry import RequestFault, RetryPolicy
from asyncrl.rollout.requests.wire import Generation, SamplingParams
from tests.scripted.answers import Action, AnswerFault, AnsweringEngine, scripted_engine

PROMPT = msgspec.Raw(b"[1,2]")
SAMPLING = SamplingParams(max_new_tokens=8, temperature=1.0)


@dataclasses.dataclass
class Heard(Unobserved):
    hear: Callable[[RequestFailed], None]

    def failed(self, failure: RequestFailed) -> None:
        self.hear(failure)


@asynccontextmanager
async def client_of(
    url: str,
    *,
    retries: int = 2,
    timeout_s: float = 5.0,
    on_failure: Callable[[RequestFailed], None] | None = None,
    clock: EngineClock | None = None,
    **options: Any,
) -> AsyncIterator[GenerateClient]:
    client = GenerateClient(
        url,
        RequestOptions(
            vocab_size=64,
            timeout_s=timeout_s,
            retry=RetryPolicy(retries=retries, patience_s=5.0, first_delay_s=0.001),
            **options,
        ),
        observer=None if on_failure is None else Heard(on_failure),
        clock=clock,
    )
    with blockbuster_ctx("asyncrl"):
        async with client:
            yield client


def failing_first(fault: AnswerFault | None, times: int, status: int = 500) -> AnsweringEngine:
    def script(request: dict[str, object], number: int) -> Action:
        return Action(fault=fault, status=status) if number < times else Action()

    return AnsweringEngine(script=script)


async def generate(client: GenerateClient, sample_id: str = "00000000.000") -> Generation:
    return await client.generate(sample_id, PROMPT, SAMPLING)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("status", RequestFault.SERVER_ERROR),
        ("drop", RequestFault.DISCONNECTED),
        ("truncate", RequestFault.DISCONNECTED),
        ("garbage", RequestFault.MALFORMED),
        ("abort", RequestFault.ABORTED),
    ],
)
async def test_a_fault_that_passes_costs_attempts_but_not_the_sample(fault: AnswerFault, kind: RequestFault) -> None:
    heard: list[RequestFailed] = []
    async with (
        scripted_engine(failing_first(fault, 2).script) as engine,
        client_of(engine.url, on_failure=heard.append) as client,
    ):
        generation = await generate(client)
        assert generation.output_ids.tolist() == [1, 3, 2]
        assert [(f.request_attempt, f.failure, f.retried) for f in heard] == [(0, kind, True), (1, kind, True)]
        assert client.statistics().failed_attempts == {kind: 2}
        rids = [str(request["rid"]) for request in engine.requests]
        assert len(set(rids)) == 3 and len({len(rid) for rid in rids}) == 1
        assert all(rid.split("-", 1)[1].startswith("00000000.000.") for rid in rids)


async def test_a_fault_that_stays_fails_the_sample_with_its_reason() -> None:
    heard: list[RequestFailed] = []
    async with (
        scripted_engine(failing_first("status", 99).script) as engine,
        client_of(engine.url, on_failure=heard.append) as client,
    ):
        with pytest.raises(GenerationFailed, match=r"server_error: HTTP 500: scripted \(attempt 3, the last\)"):
            await generate(client)
        assert [f.retried for f in heard] == [True, True, False]
        assert client.statistics().failed == 1 and client.statistics().in_flight == 0


@pytest.mark.parametrize("fault", ["status", "refuse"])
async def test_what_the_engine_refuses_is_not_sent_again(fault: AnswerFault) -> None:
    async with scripted_engine(failing_first(fault, 99, status=400).script) as engine, client_of(engine.url) as client:
        with pytest.raises(GenerationFailed, match="refused"):
            await generate(client)
        assert len(engine.requests) == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_fleet_is_waited_out_beyond_the_retries(status: int) -> None:
    async with (
        scripted_engine(failing_first("status", 6, status).script) as engine,
        client_of(engine.url, retries=0) as client,
    ):
        assert (await generate(client)).text == "yes"
        assert client.statistics().failed_attempts == {RequestFault.BUSY: 6}


async def test_a_busy_fleet_is_left_alone_for_as_long_as_it_asks() -> None:
    def script(request: dict[str, object], number: int) -> Action:
        return Action(fault="status" if number == 0 else None, status=429, headers={"Retry-After": "0.4"})

    async with scripted_engine(script) as engine, client_of(engine.url, retries=0) as client:
        began = anyio.current_time()
        assert (await generate(client)).text == "yes"
        assert anyio.current_time() - began >= 0.4


async def test_after_a_failure_of_the_engine_another_one_is_asked_for_and_after_others_not() -> None:
    keys: list[str] = []

    def script(request: dict[str, object], number: int) -> Action:
        faults: list[tuple[AnswerFault | None, int]] = [("status", 503), ("drop", 0), ("status", 500), ("status", 429)]
        fault, status = faults[number] if number < len(faults) else (None, 0)
        return Action(fault=fault, status=status)

    async with scripted_engine(script) as engine, client_of(engine.url, sticky="group") as client:
        await generate(client)
        keys = [key.partition("-")[2] for key in engine.routing_keys]  # without what tells clients apart
    assert keys == ["00000000", "00000000", "00000000~1", "00000000~2", "00000000~2"]


@pytest.mark.parametrize("kept", [True, False])
async def test_after_an_abort_it_goes_on_or_begins_anew(kept: bool) -> None:
    engine = failing_first("abort", 1)
    options = {"keeps_aborted": True, "detokenize": lambda ids: " ".join(map(str, ids))} if kept else {}
    async with scripted_engine(engine.script) as engine, client_of(engine.url, **options) as client:
        client.published("0.1")
        generation = await generate(client)
    first, second = engine.requests
    asked = [request["sampling_params"]["max_new_tokens"] for request in engine.requests]
    if kept:
        assert second["input_ids"] == [*first["input_ids"], 1, 3, 2] and asked[0] - asked[1] == 3
        assert generation.output_ids.tolist() == [1, 3, 2, 1, 3, 2] and generation.text == "1 3 2 1 3"
        assert generation.versions == (VersionSpan("0.1", 0, 6),)
    else:
        assert second["input_ids"] == first["input_ids"] and asked[0] == asked[1]
        assert generation.output_ids.tolist() == [1, 3, 2] and generation.text == "yes"


async def test_what_was_aborted_with_its_last_token_is_whole() -> None:
    async with (
        scripted_engine(failing_first("abort", 9).script) as engine,
        client_of(engine.url, keeps_aborted=True, detokenize=lambda ids: " ".join(map(str, ids))) as client,
    ):
        sampling = replace(SAMPLING, stop_token_ids=(2,))
        generation = await client.generate("00000000.000", PROMPT, sampling)
        assert generation.output_ids.tolist() == [1, 3, 2] and generation.text == "1 3"
        assert generation.finish_reason == "stop" and len(engine.requests) == 1
        assert client.statistics().completed == 1


async def test_what_was_aborted_under_weights_that_nobody_published_is_not_kept() -> None:
    def script(request: dict[str, object], number: int) -> Action:
        return Action(fault="abort", versions=(("default", 0, 3),)) if number == 0 else Action()

    heard: list[RequestFailed] = []
    async with (
        scripted_engine(script) as engine,
        client_of(engine.url, keeps_aborted=True, detokenize=str, on_failure=heard.append) as client,
    ):
        client.published("0.1")
        assert (await generate(client)).output_ids.tolist() == [1, 3, 2]
    assert [failed.failure for failed in heard] == ["malformed"]


async def test_while_it_is_held_nothing_is_sent_and_nothing_sent_again() -> None:
    async with scripted_engine(failing_first("abort", 1).script) as engine, client_of(engine.url) as client:
        engine.script = lambda request, number: Action(fault="hang" if number == 0 else None)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate, client)
            await engine.until(lambda e: e.in_flight == 1)
            with client.held():
                tasks.start_soon(generate, client, "00000001.000")
                engine.script = lambda request, number: Action()
                engine.abort_all()
                await engine.until(lambda e: e.in_flight == 0)
                await anyio.sleep(0.1)  # longer than the pause before another attempt
                assert len(engine.requests) == 1
        assert len(engine.requests) == 3 and client.statistics().completed == 2


async def test_requests_share_kv_with_those_of_the_same_weights_where_engines_keep_it() -> None:
    async with scripted_engine() as engine, client_of(engine.url, keeps_kv=True) as client:
        await generate(client)
        for version in ("0.1", "0.2"):
            client.published(version)
            engine.version = version
            await generate(client)
        keys = [request.get("extra_key") for request in engine.requests]
        assert keys[0] is None
        assert [key.partition("-")[2] for key in keys[1:]] == ["0.1", "0.2"]  # without what tells clients apart
    async with scripted_engine() as engine, client_of(engine.url) as client:
        client.published("0.1")
        await generate(client)
        assert "extra_key" not in engine.requests[0]


async def test_what_an_engine_kept_of_an_earlier_job_is_not_taken_for_kv_of_the_same_weights() -> None:
    """An external engine outlives its jobs, and each of them begins with the versions 0.0, 0.1, ..."""
    async with scripted_engine() as engine:
        for _ in range(2):
            async with client_of(engine.url, keeps_kv=True) as client:
                client.published("0.1")
                await generate(client)
        first, second = (request["extra_key"] for request in engine.requests)
        assert first != second


async def test_an_answer_of_weights_that_nobody_published_is_sent_for_again() -> None:
    async with scripted_engine() as engine, client_of(engine.url, retries=1) as client:
        client.published("0.1")
        engine.version = "default"  # of an engine that was started again and asked too early

        def corrected(request: Any, number: int) -> Action:
            if number:
                engine.version = "0.1"
            return Action()

        engine.script = corrected
        generation = await generate(client)
        assert {span.version for span in generation.versions} == {"0.1"}
        assert client.statistics().failed_attempts == {RequestFault.MALFORMED: 1}
        client.published("fixed")  # weights without a step never change
        engine.script, engine.version = lambda request, number: Action(), "default"
        assert (await generate(client)).versions[0].version == "default"


async def test_a_router_that_is_not_there_yet_is_waited_for() -> None:
    async with scripted_engine() as gone:
        url = gone.url
    failed, answered = anyio.Event(), anyio.Event()
    async with client_of(url, retries=0, on_failure=lambda failure: failed.set()) as client:

        async def ask() -> None:
            await generate(client)
            answered.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await failed.wait()
            async with scripted_engine(port=int(url.rsplit(":", 1)[1])):
                await answered.wait()
        assert client.statistics().completed == 1
        assert set(client.statistics().failed_attempts) == {RequestFault.UNREACHABLE}


async def test_a_swallowed_response_is_issued_again_after_its_deadline() -> None:
    async with (
        scripted_engine(failing_first("hang", 1).script) as engine,
        client_of(engine.url, timeout_s=0.2) as client,
    ):
        assert (await generate(client)).text == "yes"
        assert client.statistics().failed_attempts == {RequestFault.TIMED_OUT: 1}
        await engine.until(lambda e: e.disconnected == 1)  # the engine hears of it, and frees the request


async def test_a_wait_can_be_named_while_it_lasts() -> None:
    async with scripted_engine(failing_first("hang", 1).script) as engine, client_of(engine.url) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate, client)
            await engine.until(lambda e: e.in_flight > 0)
            (wait,) = WAITS.snapshot()
            assert wait.what == "response" and wait.subject == engine.requests[0]["rid"] and wait.deadline_s == 5
            tasks.cancel_scope.cancel()
        assert WAITS.snapshot() == ()


async def test_cancelling_leaves_nothing_in_flight() -> None:
    async with scripted_engine(failing_first("hang", 99).script) as engine, client_of(engine.url) as client:
        async with anyio.create_task_group() as tasks:
            for index in range(8):
                tasks.start_soon(generate, client, f"00000000.{index:03d}")
            await engine.until(lambda e: e.in_flight == 8)
            tasks.cancel_scope.cancel()
        assert client.statistics().in_flight == 0
        await engine.until(lambda e: e.in_flight == 0)


async def test_no_id_is_used_by_two_clients() -> None:
    async with scripted_engine() as engine, client_of(engine.url) as one, client_of(engine.url) as other:
        await generate(one)
        await generate(other)
        assert engine.requests[0]["rid"] != engine.requests[1]["rid"]


def test_no_event_of_the_rollout_side_hides_a_field_of_the_line_it_is_written_on() -> None:
    for event in (e for e in vars(rollout_events).values() if isinstance(e, type) and issubclass(e, Event)):
        own = {field.name for field in dataclasses.fields(event)}
        assert not own & {"v", "attempt", "time", "kind"}, event


# answers that are not believed


async def test_bodies_that_were_swapped_train_nobody_and_are_asked_for_again() -> None:
    def script(request: dict[str, Any], number: int) -> Action:
        ids = (5 if ".000." in request["rid"] else 6, 2)
        other = {"id": request["rid"].replace(".000.", ".009.")} if number < 2 else {}
        return Action(ids, meta={"weight_version": "0.1@engine-1", **other})

    heard: list[RequestFailed] = []
    async with scripted_engine(script) as engine, client_of(engine.url, on_failure=heard.append) as client:
        with capture_logs() as logs:
            assert (await generate(client)).output_ids.tolist() == [5, 2]
            assert (await generate(client, "00000000.001")).output_ids.tolist() == [6, 2]
        assert client.statistics().malformed == {(Defect.FOREIGN, "engine-1"): 2}
        assert [(f.failure, f.engine, f.retried) for f in heard] == [("malformed", "engine-1", True)] * 2
    [line] = [line for line in logs if line["log_level"] == "warning"]
    assert line["engine"] == "engine-1" and "it answers another request" in line["reason"], "told once"


@pytest.mark.parametrize(
    "spans",
    [(("1.1", 0, 3),), (("0.7", 0, 3),), (("default", 0, 1), ("0.2", 1, 3)), (("0.2", 0, 1), ("0.1", 1, 3))],
    ids=["of another attempt", "not yet published", "of no step", "older after newer"],
)
async def test_weights_that_this_attempt_did_not_publish_make_no_fresh_answer(
    spans: tuple[tuple[str, int, int], ...],
) -> None:
    def script(request: dict[str, object], number: int) -> Action:
        return Action(versions=spans if number == 0 else (("0.1", 0, 1), ("0.2", 1, 3)))

    async with scripted_engine(script) as engine, client_of(engine.url) as client:
        for version in ("0.0", "0.1", "0.2"):
            client.published(version)
        versions = [span.version for span in (await generate(client)).versions]
        assert versions == ["0.1", "0.2"] and len(engine.requests) == 2
        assert client.statistics().malformed == {(Defect.UNPUBLISHED, ""): 1}


async def test_weights_of_another_job_on_the_same_engine_are_never_taken_for_ours() -> None:
    def script(request: dict[str, object], number: int) -> Action:
        owner = "here:/runs/theirs" if number == 0 else "here:/runs/ours"
        return Action(versions=((f"0.0@external-0@{owner}", 0, 3),))

    async with scripted_engine(script) as engine, client_of(engine.url, owner="here:/runs/ours") as client:
        client.published("0.0")
        assert [span.version for span in (await generate(client)).versions] == ["0.0"]
        assert len(engine.requests) == 2 and sum(client.statistics().malformed.values()) == 1


async def test_an_answer_with_news_in_a_pause_is_judged_when_the_pause_is_over() -> None:
    clock = EngineClock()
    async with scripted_engine() as engine, client_of(engine.url, clock=clock) as client:
        client.published("0.0")
        clock.pause()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate, client)
            await engine.until(lambda engine: len(engine.requests) == 1 and not engine.in_flight)
            await anyio.sleep(0.05)
            client.published(engine.version)
            clock.resume()
        assert client.statistics().completed == 1 and not client.statistics().failed_attempts
