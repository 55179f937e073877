from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from blockbuster import blockbuster_ctx
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.sample import Sample
from asyncrl.data.tokenizer import PolicyTokenizer
from asyncrl.errors import ConfigError, DataError, RewardError, RolloutError
from asyncrl.observability.events import EventLog
from asyncrl.observability.waits import WAITS
from asyncrl.rollout.scheduling.collection import Collection, FirstBatchCheck
from asyncrl.rollout.scheduling.group import GroupState
from tests.rollout.conftest import StartExecutor
from tests.scripted.answers import Action, scripted_engine

MODULE = "tests.rollout.reward_functions"


def group_of(request: dict[str, Any]) -> int:
    return int(request["rid"].split("-", 1)[1].split(".")[0])


def sample_of(request: dict[str, Any]) -> int:
    return int(request["rid"].split(".")[1])


async def test_a_batch_holds_what_was_sampled_and_is_committed(start_executor: StartExecutor, events: EventLog) -> None:
    def script(request: dict[str, Any], number: int) -> Action:
        length = 1 + sample_of(request)
        ids = (*range(5, 4 + length), 2)
        logprobs = tuple(-0.25 * (i + 1) for i in range(length))
        return Action(ids, "yes" if sample_of(request) % 2 else "no", logprobs, "length" if length == 4 else "stop")

    async with scripted_engine(script) as engine, start_executor(engine) as executor:
        executor.set_weight_version("0.1")
        batch = await executor.get(0)
        assert batch.num_samples == 12 and batch.group_ids == ("00000000", "00000001", "00000002")
        assert batch.sampled_lengths.tolist() == [1, 2, 3, 4] * 3
        assert batch.rewards.tolist() == [0, 1, 0, 1] * 3
        assert batch.truncated.tolist() == [False, False, False, True] * 3
        assert batch.logprobs[batch.sampled][:10].tolist() == [
            -0.25,
            -0.25,
            -0.5,
            -0.25,
            -0.5,
            -0.75,
            -0.25,
            -0.5,
            -0.75,
            -1.0,
        ]
        assert batch.tokens[batch.sequence_lengths[0] - 1] == 2
        assert torch.equal(batch.group_index, torch.arange(3).repeat_interleave(4))
        await executor.commit(0)
        metrics = executor.last_rollout
        assert metrics.reward_mean == 0.5 and metrics.response_tokens_mean == 2.5
        assert (
            metrics.zero_variance_groups == 0
            and metrics.off_version_fraction == 0
            and metrics.truncated_fraction == 0.25
        )
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in metrics.as_dict().values())
        assert executor.statistics().groups[GroupState.TRAINED] == 3

    kinds = Counter(line["kind"] for line in events.recent)
    assert kinds == {
        "group_admitted": 3,
        "group_running": 3,
        "group_finished": 3,
        "groups_delivered": 1,
        "groups_trained": 1,
    }


async def test_requests_carry_ids_within_the_vocabulary_and_all_end_tokens(
    start_executor: StartExecutor, tokenizer: PolicyTokenizer
) -> None:
    async with scripted_engine() as engine, start_executor(engine, rollout={"stop": ("\n",)}) as executor:
        await executor.get(0)
        newline = tokenizer.encode(["\n"], add_special_tokens=False)[0][0]
        for request in engine.requests:
            assert request["sampling_params"]["stop_token_ids"] == sorted([2, newline])
            assert "stop" not in request["sampling_params"]
            assert all(0 <= token < tokenizer.vocab_size for token in request["input_ids"])


async def test_a_response_ends_with_the_token_that_completes_a_stop_string_whoever_sees_it(
    start_executor: StartExecutor, tokenizer: PolicyTokenizer
) -> None:
    """The engine has seen the stop of the first samples, and missed that of the others."""
    (said,) = tokenizer.encode(["1end"], add_special_tokens=False)
    missed = tokenizer.encode(["1end23"], add_special_tokens=False)[0]

    def script(request: dict[str, Any], number: int) -> Action:
        seen = Action(tuple(said.tolist()), "1end", meta={"finish_reason": {"type": "stop", "matched": "end"}})
        return seen if number % 2 else Action(tuple(missed.tolist()), "1end23", finish="length")

    texts: list[str] = []
    stop = {"stop": ("end", "\n")}
    async with scripted_engine(script) as engine, start_executor(engine, rollout=stop) as executor:
        batch = await executor.get(0)
        texts += [request["sampling_params"]["stop"][0] for request in engine.requests]
        assert all(request["sampling_params"]["no_stop_trim"] for request in engine.requests)
    assert set(texts) == {"end"}, "the other one is one token"
    rows = batch.tokens.split(batch.sequence_lengths.tolist())
    assert all(row[-len(said) :].tolist() == said.tolist() for row in rows) and not batch.truncated.any()
    ends = zip(batch.versions, batch.sequence_lengths.tolist(), strict=True)
    assert all(spans[-1].end == length for spans, length in ends)


async def test_an_engine_that_answers_what_cannot_be_sampled_is_told_and_costs_no_sample(
    start_executor: StartExecutor, events: EventLog
) -> None:
    """A router asks two engines in turn, of which one computes garbage."""
    told: list[tuple[str, str]] = []

    def script(request: dict[str, Any], number: int) -> Action:
        stamp = {"weight_version": f"0.1@engine-{number % 2}"}
        return Action((1, 3, 2), logprobs=(-0.5, 7.0, -0.5) if number % 2 and not told else None, meta=stamp)

    def distrust(engine: str, reason: str) -> None:
        told.append((engine, reason))

    rollout = {"request_retries": 50}
    async with (
        scripted_engine(script) as engine,
        start_executor(engine, distrust=distrust, rollout=rollout) as executor,
    ):
        batch = await executor.get(0)
    assert batch.num_samples == 12
    [(engine_id, reason)] = told
    assert engine_id == "engine-1" and re.match(
        r"8 of its last \d+ answers cannot have been sampled; the last: .*engine-1", reason
    )


async def test_concurrency_is_bounded_and_used(start_executor: StartExecutor) -> None:
    async with (
        scripted_engine(lambda request, number: Action(latency_s=0.2)) as engine,
        start_executor(engine, rollout={"concurrency": 5}) as executor,
    ):
        await executor.get(0)
        assert engine.most_in_flight == 5


async def test_two_epochs_draw_every_prompt_twice(start_executor: StartExecutor, events: EventLog) -> None:
    async with (
        scripted_engine() as engine,
        start_executor(engine, rollout={"prompts_per_step": 8, "samples_per_prompt": 2}) as executor,
    ):
        assert executor.get_num_rollout_per_epoch() == 5
        for rollout_id in range(10):
            await executor.get(rollout_id)
            await executor.commit(rollout_id)
    admitted = [line for line in events.recent if line["kind"] == "group_admitted"]
    for epoch in (0, 1):
        assert len({line["prompt_id"] for line in admitted if line["epoch"] == epoch}) == 40


async def test_tokens_of_other_weights_are_counted(start_executor: StartExecutor) -> None:
    spans = (("0.1", 0, 1), ("0.2", 1, 4))
    async with (
        scripted_engine(lambda request, number: Action((5, 6, 7, 2), versions=spans)) as engine,
        start_executor(engine) as executor,
    ):
        executor.set_weight_version("0.1")
        executor.set_weight_version("0.2")
        batch = await executor.get(0)
        assert [span.version for span in batch.versions[0]] == ["0.1", "0.2"]
        metrics = executor.last_rollout
        assert metrics.off_version_fraction == 0.25


# what fails, and what it costs


async def test_a_failed_sample_leaves_the_rest_of_its_group_in(start_executor: StartExecutor, events: EventLog) -> None:
    def script(request: dict[str, Any], number: int) -> Action:
        bad = group_of(request) == 1 and sample_of(request) == 2
        return Action(fault="status", status=400) if bad else Action()

    async with scripted_engine(script) as engine, start_executor(engine) as executor:
        batch = await executor.get(0)
        assert batch.num_samples == 11
        assert batch.group_index.tolist() == [0] * 4 + [1] * 3 + [2] * 4
        assert "00000001.002" not in batch.sample_ids
        metrics = executor.last_rollout
        assert metrics.failed_samples == 1 and metrics.failed_attempts == 1
    assert [line["sample_id"] for line in events.recent if line["kind"] == "request_failed"] == ["00000001.002"]


@pytest.mark.parametrize(
    ("usable", "algorithm", "kept"), [(1, "grpo", False), (2, "grpo", True), (1, "sft", True), (0, "sft", False)]
)
async def test_a_group_without_enough_samples_is_replaced(
    start_executor: StartExecutor, events: EventLog, usable: int, algorithm: str, kept: bool
) -> None:
    def script(request: dict[str, Any], number: int) -> Action:
        bad = group_of(request) == 1 and sample_of(request) >= usable
        return Action(fault="status", status=400) if bad else Action()

    async with scripted_engine(script) as engine, start_executor(engine, train={"algorithm": algorithm}) as executor:
        batch = await executor.get(0)
        assert batch.group_ids == (
            ("00000000", "00000001", "00000002") if kept else ("00000000", "00000002", "00000003")
        )
        await executor.commit(0)
        assert executor.statistics().groups[GroupState.DROPPED] == int(not kept)
    dropped = [line for line in events.recent if line["kind"] == "group_dropped"]
    assert len(dropped) == int(not kept)
    if dropped:
        assert f"only {usable} of 4 samples usable (generation refused)" in dropped[0]["reason"]


async def test_when_everything_fails_get_ends_with_counts_and_the_first_failure(start_executor: StartExecutor) -> None:
    async with (
        scripted_engine(lambda request, number: Action(fault="status", status=400)) as engine,
        start_executor(engine) as executor,
    ):
        with pytest.raises(
            RolloutError,
            match=r"9 prompt groups failed .* a batch of 3.*first failure: generation refused: HTTP 400: scripted",
        ):
            await executor.get(0)
        groups = executor.statistics().groups
        assert groups[GroupState.DROPPED] >= 9 and sum(groups.values()) == groups[GroupState.DROPPED]


async def test_random_faults_lose_no_sample(start_executor: StartExecutor) -> None:
    faults = ["status", None, "drop", None, None, "truncate", "garbage", None, "abort", None, None]

    def script(request: dict[str, Any], number: int) -> Action:
        return Action(fault=faults[number % len(faults)], latency_s=0.001 * (number % 3))  # type: ignore[arg-type]

    with blockbuster_ctx("asyncrl"):
        async with (
            scripted_engine(script) as engine,
            start_executor(engine, rollout={"request_retries": 20}) as executor,
        ):
            for rollout_id in range(4):
                batch = await executor.get(rollout_id)
                assert batch.num_samples == 12
                await executor.commit(rollout_id)
            assert executor.statistics().client.failed == 0
            assert sum(executor.statistics().client.failed_attempts.values()) > 20
        assert WAITS.snapshot() == ()


async def test_a_reward_that_fails_on_more_than_half_of_the_first_batch_ends_the_run(
    start_executor: StartExecutor,
) -> None:
    reward = {"function": f"{MODULE}:raises", "workers": 0}
    async with scripted_engine() as engine, start_executor(engine, reward=reward) as executor:
        with pytest.raises(
            RewardError,
            match=rf"{MODULE}:raises failed on 7 of the first 12 samples; the first failure: ValueError: no idea",
        ):
            await executor.get(0)


async def test_a_reward_that_fails_later_is_a_counted_outcome(start_executor: StartExecutor, events: EventLog) -> None:
    def script(request: dict[str, Any], number: int) -> Action:
        return Action(text="raise" if group_of(request) >= 3 and sample_of(request) > 1 else "yes")

    reward = {"function": f"{MODULE}:by_text", "workers": 0}
    async with scripted_engine(script) as engine, start_executor(engine, reward=reward) as executor:
        assert (await executor.get(0)).num_samples == 12
        batch = await executor.get(1)
        assert batch.num_samples == 6 and batch.rewards.tolist() == [1.0] * 6
        assert executor.statistics().reward_failures == {"ValueError": 6}
    assert sum(line["kind"] == "reward_failed" for line in events.recent) == 6


async def test_a_reward_of_groups_scores_the_samples_of_each_prompt_together(
    start_executor: StartExecutor, events: EventLog
) -> None:
    def script(request: dict[str, Any], number: int) -> Action:
        bad = sample_of(request) == 3 and group_of(request) == 1
        return Action(text="yes" * sample_of(request), fault="status" if bad else None, status=400)

    reward = {"function": f"{MODULE}:ranks", "scope": "group", "workers": 0}
    async with scripted_engine(script) as engine, start_executor(engine, reward=reward) as executor:
        batch = await executor.get(0)
        assert batch.rewards.tolist() == [0.75, 0.5, 0.25, pytest.approx(2 / 3), pytest.approx(1 / 3), 0.75, 0.5, 0.25]
        assert executor.last_rollout.failed_samples == 4 and executor.statistics().reward_failures == {}
    assert not [line for line in events.recent if line["kind"] == "reward_failed"], "to abstain is no fault"


async def test_cancelling_a_get_loses_nothing(start_executor: StartExecutor) -> None:
    async with (
        scripted_engine(lambda request, number: Action(fault="hang")) as engine,
        start_executor(engine) as executor,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(executor.get, 0)
            await engine.until(lambda e: e.in_flight == 12)
            with pytest.raises(RolloutError, match="is being gathered already"):
                await executor.get(0)
            tasks.cancel_scope.cancel()
        groups = executor.statistics().groups
        assert groups[GroupState.RUNNING] == sum(groups.values()) == 3
        engine.released.set()
        assert (await executor.get(0)).group_ids == ("00000000", "00000001", "00000002")
        assert len(engine.requests) == 12


async def test_disposing_ends_a_get_with_a_reason(start_executor: StartExecutor) -> None:
    async with scripted_engine(lambda request, number: Action(fault="hang")) as engine:
        async with start_executor(engine) as executor, anyio.create_task_group() as tasks:

            async def get() -> None:
                with pytest.raises(RolloutError, match="the executor was disposed while rollout 0 was gathered"):
                    await executor.get(0)

            tasks.start_soon(get)
            await engine.until(lambda e: e.in_flight == 12)
            await executor.dispose()
            await executor.dispose()
            groups = executor.statistics().groups
            assert groups[GroupState.DROPPED] == sum(groups.values()) == 3
            await engine.until(lambda e: e.in_flight == 0)
        with pytest.raises(RolloutError, match="disposed"):
            await executor.get(1)


async def test_what_was_delivered_and_never_trained_is_dropped_with_a_reason(
    start_executor: StartExecutor, events: EventLog
) -> None:
    async with scripted_engine() as engine:
        async with start_executor(engine) as executor:
            await executor.get(0)
            await executor.commit(0)
            batch = await executor.get(1)
        groups = executor.statistics().groups
    assert (groups[GroupState.DELIVERED], groups[GroupState.TRAINED], groups[GroupState.DROPPED]) == (0, 3, 3)
    dropped = [line for line in events.recent if line["kind"] == "group_dropped"]
    assert tuple(line["group_id"] for line in dropped) == batch.group_ids
    assert {line["reason"] for line in dropped} == {"the job ended before they were trained"}


async def test_get_and_commit_out_of_order_are_refused(start_executor: StartExecutor) -> None:
    async with scripted_engine() as engine, start_executor(engine) as executor:
        with pytest.raises(RolloutError, match="never delivered"):
            await executor.commit(0)
        await executor.get(0)
        with pytest.raises(RolloutError, match="already delivered"):
            await executor.get(0)
        with pytest.raises(RolloutError, match="rollout 2 was asked for out of order; the next one is 1"):
            await executor.get(2)
        await executor.commit(0)
        with pytest.raises(RolloutError, match="already committed"):
            await executor.commit(0)


# what is refused at the start


async def test_bad_data_is_refused_before_anything_is_sampled(start_executor: StartExecutor, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"question": "x"}) + "\n")
    async with scripted_engine() as engine:
        for sections, where in [
            ({"data": {"source": str(bad)}}, "data"),
            ({"eval": {"data": {"source": str(bad)}}}, "eval.data"),
        ]:
            with pytest.raises(ExceptionGroup) as error:
                async with start_executor(engine, **sections):
                    pass
            assert error.group_contains(DataError, match=f'{where}: .*line 1: field "prompt" is missing')
        assert engine.requests == []


async def test_sampling_that_cannot_work_is_refused(start_executor: StartExecutor) -> None:
    async with scripted_engine() as engine:
        for rollout, message in [
            ({"stop": ("\n",), "ignore_eos": True}, "rollout.stop would have no effect"),
            ({"max_new_tokens": 64}, "leave no room for a prompt in a context of 64"),
        ]:
            with pytest.raises(ExceptionGroup) as error:
                async with start_executor(engine, rollout=rollout):
                    pass
            assert error.group_contains(ConfigError, match=message)


# the pure bookkeeping


@given(wanted=st.integers(1, 20), drops=st.integers(0, 60), max_drops=st.integers(0, 50))
def test_a_collection_gives_up_exactly_when_its_budget_is_spent(wanted: int, drops: int, max_drops: int) -> None:
    collection = Collection(wanted, max_drops, max_filtered=max_drops)
    for count in (lambda: collection.drop("x", "y"), lambda: collection.filter("z")):
        verdicts = [count() for _ in range(drops)]
        assert [v is not None for v in verdicts] == [i >= max_drops for i in range(drops)]


@pytest.mark.parametrize(("fraction", "allowed"), [(0.5, 6), (0.0, 0), (1.0, 12)])
def test_the_first_batch_check_counts_until_it_is_closed(fraction: float, allowed: int) -> None:
    failed = Sample("s", "g", (), "stop", "", failure="ValueError: x")
    check = FirstBatchCheck("f", 12, fraction)
    verdicts = [check.observe(failed) is not None for _ in range(12)]
    assert verdicts == [i >= allowed for i in range(12)]
    check.closed = True
    assert check.observe(failed) is None


async def test_what_the_model_answered_is_kept_as_text(
    start_executor: StartExecutor, tmp_path: Path, prompts: Path
) -> None:
    settings: dict[str, Any] = {"eval": {"data": {"source": str(prompts)}}, "debug": {"save_rollouts": True}}
    async with scripted_engine() as engine, start_executor(engine, samples={"per_step": 5}, **settings) as executor:
        executor.set_weight_version("0.1")
        await executor.eval(0)
        await executor.get(0)
        await executor.commit(0)
    kept = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in kept] == [("eval", 0)] * 40 + [("train", 1)] * 5
    assert all(line["prompt"].endswith("+1=") and line["answer"] == "yes" for line in kept)
    assert {line["prompt_id"] for line in kept[:40]} == {f"train.jsonl:{i}" for i in range(1, 41)}
    saved = json.loads((tmp_path / "rollouts" / "rollout-000000.json").read_text())["samples"]
    assert len(saved) == 12 and {"prompt_id", "prompt", "response", "answer", "reward"} <= saved[0].keys()
