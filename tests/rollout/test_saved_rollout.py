from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.data.prompt_stream import PromptStream
from asyncrl.data.sample import Prompt, Sample, SampleGroup, TokenSequence, Turn, VersionSpan
from asyncrl.data.staleness import Bound
from asyncrl.errors import AsyncRLError, CheckpointError, DataError, RolloutError
from asyncrl.observability.events import EventLog
from asyncrl.rollout.group_events import GroupDropped, GroupFinished
from asyncrl.rollout.saved_rollout import STATE, TENSORS, SavedRollout, decode_rollout, encode_rollout, made_with
from asyncrl.rollout.scheduling.group import GroupState, Issue
from asyncrl.rollout.scheduling.ledger import Reached
from tests.rollout.conftest import StartExecutor
from tests.scripted.answers import Action, AnsweringEngine, scripted_engine

PROMPTS = tuple(Prompt(f"p{i}", f"{i}", np.arange(i + 1, dtype=np.int32)) for i in range(5))


def a_stream(prompts: tuple[Prompt, ...] = PROMPTS) -> PromptStream:
    return PromptStream(prompts, seed=3, shuffle=True)


@st.composite
def issues(draw: st.DrawFn) -> Issue:
    drawn = a_stream().at(draw(st.integers(0, 40)))
    return Issue(drawn.ordinal, drawn.prompt, drawn.epoch, draw(st.integers(0, 2)))


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    length = draw(st.integers(0, 5))
    logprobs = draw(st.lists(st.floats(-30, 0, width=32), min_size=length, max_size=length))
    return Turn(
        np.arange(draw(st.integers(0, 3)), dtype=np.int32),
        np.arange(length, dtype=np.int32),
        np.array(logprobs, np.float32),
        (VersionSpan("0.1", 0, length),) if length else (),
    )


@st.composite
def groups(draw: st.DrawFn) -> tuple[Issue, SampleGroup]:
    issue = draw(issues())
    samples = []
    for index in range(draw(st.integers(1, 3))):
        sequences = draw(st.lists(st.lists(turns(), min_size=1, max_size=3), max_size=2))
        samples.append(
            Sample(
                sample_id=f"{issue.group_id}.{index:03d}",
                group_id=issue.group_id,
                sequences=tuple(TokenSequence(tuple(made)) for made in sequences),
                finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
                text=draw(st.text(max_size=5)),
                reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
                reward_parts=draw(
                    st.dictionaries(st.text("ab/ö"), st.floats(allow_nan=False, allow_infinity=False), max_size=2)
                ),
                failure=draw(st.none() | st.just("timeout")),
            )
        )
    return issue, SampleGroup(issue.group_id, issue.prompt, tuple(samples))


def plain(sample: Sample) -> Any:
    arrays = [
        [
            [(a.dtype, a.tobytes()) for a in (turn.context_ids, turn.output_ids, turn.logprobs)] + [turn.versions]
            for turn in sequence.turns
        ]
        for sequence in sample.sequences
    ]
    return (
        arrays,
        [getattr(sample, name) for name in ("sample_id", "group_id", "finish_reason", "text")],
        (
            sample.reward,
            sample.reward_parts,
            sample.failure,
        ),
    )


@given(st.lists(groups(), max_size=4), st.lists(issues(), max_size=4), st.integers(0, 40))
def test_what_was_saved_is_read_back_bit_for_bit(
    finished: list[tuple[Issue, SampleGroup]], again: list[Issue], drawn: int
) -> None:
    stream, later = a_stream(), a_stream()
    for _ in range(drawn):
        stream.draw()
    saved = SavedRollout(stream.state(), tuple(again), tuple(finished), {"trained": 7}, {"late": 2}, {"k": [1]})
    read = decode_rollout(encode_rollout(saved), later)
    assert later.state() == stream.state() and later.draw().ordinal == drawn
    for name in ("prompts", "again", "ended", "drop_reasons", "made_with"):
        assert getattr(read, name) == getattr(saved, name)
    assert [issue for issue, _ in read.finished] == [issue for issue, _ in finished]
    for (_, group), (_, original) in zip(read.finished, finished, strict=True):
        assert group.prompt is original.prompt
        assert [plain(sample) for sample in group.samples] == [plain(sample) for sample in original.samples]


FILES = encode_rollout(SavedRollout(a_stream().state(), (), (), {}, {}, {}))


@pytest.mark.parametrize(
    ("files", "error", "told"),
    [
        ({}, CheckpointError, r"has no rollout\.json, rollout\.safetensors.*checkpoint\.resume = never"),
        (FILES | {STATE: b"{"}, CheckpointError, "damaged"),
        (FILES | {TENSORS: b"nonsense"}, CheckpointError, "damaged"),
        (FILES | {STATE: msgspec.json.encode({"format": 99})}, CheckpointError, "format 99"),
        (FILES | {STATE: msgspec.json.encode({"format": 3})}, CheckpointError, "damaged"),
    ],
)
def test_files_that_cannot_be_read_are_named(files: Mapping[str, bytes], error: type[AsyncRLError], told: str) -> None:
    with pytest.raises(error, match=told):
        decode_rollout(files, a_stream())


def test_other_data_is_refused() -> None:
    with pytest.raises(DataError, match="size was 5, is 4"):
        decode_rollout(FILES, a_stream(PROMPTS[:4]))


def test_what_a_reward_said_need_not_be_text() -> None:
    (issue, group), *_ = [finished_group()]
    group = replace(group, samples=(msgspec.structs.replace(group.samples[0], failure="no file \udcff"),))
    saved = SavedRollout(a_stream().state(), (), ((issue, group),), {}, {"no file \udcff": 1}, {})
    read = decode_rollout(encode_rollout(saved), a_stream())
    assert read.finished[0][1].samples[0].failure == "no file \\udcff" and read.drop_reasons == {"no file \\udcff": 1}


def finished_group() -> tuple[Issue, SampleGroup]:
    draw = a_stream().at(2)
    issue = Issue(draw.ordinal, draw.prompt, draw.epoch)
    turn = Turn(draw.prompt.token_ids, np.empty(0, np.int32), np.empty(0, np.float32), ())
    sample = Sample.of_turn("s", issue.group_id, turn, finish_reason="stop", text="")
    return issue, SampleGroup(issue.group_id, draw.prompt, (sample,))


@pytest.mark.parametrize(
    ("section", "key", "value", "kept"),
    [
        ("rollout", "temperature", 0.7, False),
        ("rollout", "samples_per_prompt", 4, False),
        ("reward", "args", {"target": 3}, False),
        ("train", "lr", 1.0, True),
        ("rollout", "concurrency", 1, True),
    ],
)
def test_finished_groups_come_back_only_where_the_same_would_be_made_again(
    section: str, key: str, value: Any, kept: bool
) -> None:
    saved = SavedRollout(a_stream().state(), (), (finished_group(),), {}, {}, made_with(Config()))
    saved = decode_rollout(encode_rollout(saved), a_stream())
    left, differing = saved.under(made_with(Config.model_validate({section: {key: value}})))
    assert differing == (() if kept else (f"{section}.{key}",))
    issue = finished_group()[0]
    assert ([i for i, _ in left.finished], list(left.again)) == (([issue], []) if kept else ([], [issue]))


# the executor


ONE_AHEAD = {"rollout": {"prompts_per_step": 3, "samples_per_prompt": 2, "concurrency": 12, "max_staleness": 1}}


def held(names: set[str]) -> Any:
    """Answers at once but for these groups, which hang."""

    def script(request: dict[str, Any], number: int) -> Action:
        return Action(fault="hang") if request["rid"].split("-", 1)[1].split(".")[0] in names else Action()

    return script


async def saved_after_one_batch(start: StartExecutor, engine: AnsweringEngine, events: EventLog) -> dict[str, bytes]:
    """Batch 0 was trained, groups 3 and 5 are finished, 4 runs."""
    missing, there = {f"{ordinal:08d}" for ordinal in (0, 1, 2, 3, 5)}, anyio.Event()

    def listen(line: dict[str, Any]) -> None:
        if line["kind"] == GroupFinished.kind:
            missing.discard(line["group_id"])
            if not missing:
                there.set()

    events.listen(listen)
    async with start(engine, **ONE_AHEAD) as executor:
        engine.version = "0.0"
        executor.set_weight_version("0.0")
        executor.generate_ahead(0, 9)
        with anyio.fail_after(10):  # a batch takes what is finished
            await there.wait()
        await executor.get(0)
        with pytest.raises(RolloutError, match="rollout 0 was delivered and not committed"):
            await executor.save()
        await executor.commit(0)
        return await executor.save()


async def test_finished_groups_come_back_running_ones_are_issued_again_and_trained_ones_never(
    start_executor: StartExecutor, events: EventLog
) -> None:
    async with scripted_engine(held({"00000004"})) as engine:
        files = await saved_after_one_batch(start_executor, engine, events)
    async with scripted_engine() as engine, start_executor(engine, **ONE_AHEAD) as executor:
        told_before: list[tuple[Reached, bool]] = []

        async def told(reached: Reached) -> None:
            told_before.append((reached, any(line["kind"] == "groups_restored" for line in events.recent)))

        reached = await executor.restore(files, 1, told)
        assert reached == Reached(6, {3: 0, 4: 0, 5: 0})
        assert told_before == [(reached, False)], "what is rolled back is in the log before what comes back"
        assert any(line["kind"] == "groups_restored" for line in events.recent)
        assert executor.statistics().groups[GroupState.TRAINED] == 3
        engine.version = "1.1"
        executor.set_weight_version("1.1")
        batch = await executor.get(1)
        assert batch.group_ids == ("00000003", "00000005", "00000004")  # earliest deadline first
        assert [spans[0].version for spans in batch.versions] == ["0.0"] * 4 + ["1.1"] * 2
        await executor.commit(1)
        executor.generate_ahead(2, 9)
        assert (await executor.get(2)).group_ids == ("00000006", "00000007", "00000008")
        asked = {request["rid"].split("-", 1)[1].split(".")[0] for request in engine.requests}
        assert not asked & {"00000000", "00000001", "00000002", "00000003", "00000005"}
    assert [line["group_ids"] for line in events.recent if line["kind"] == "groups_restored"] == [
        ("00000003", "00000005")
    ]


@pytest.mark.parametrize("trained", [0, 1])
async def test_a_job_may_end_in_the_midst_of_a_step_and_nothing_is_skipped_or_repeated(
    start_executor: StartExecutor, events: EventLog, trained: int
) -> None:
    """Where the step was finished after all, its batch is trained; else its groups are made again."""
    async with scripted_engine() as engine, start_executor(engine, **ONE_AHEAD) as executor:
        engine.version = "0.0"
        executor.set_weight_version("0.0")
        executor.generate_ahead(0, 9)
        taken = (await executor.get(0)).group_ids
        executor.settle(trained)
        files = await executor.save()
        groups = executor.statistics().groups
        assert (groups[GroupState.TRAINED], groups[GroupState.DELIVERED]) == (3 * trained, 3 - 3 * trained)
    ends = [(line["kind"], line.get("group_ids", ())) for line in events.recent if line["kind"] == "groups_trained"]
    assert ends == ([("groups_trained", taken)] if trained else [])
    async with scripted_engine() as engine, start_executor(engine, **ONE_AHEAD) as executor:
        reached = await executor.restore(files, trained)
        assert [reached.had_ended(group_id) for group_id in taken] == [bool(trained)] * 3
        engine.version = f"1.{trained}"
        executor.set_weight_version(engine.version)
        executor.generate_ahead(trained, 4)
        rest: list[str] = []
        for step in range(trained, 4):
            rest += (await executor.get(step)).group_ids
            await executor.commit(step)
            engine.version = f"1.{step + 1}"
            executor.set_weight_version(engine.version)
    assert sorted([*rest, *(taken if trained else ())]) == [f"{ordinal:08d}" for ordinal in range(12)]


@pytest.mark.parametrize("changed", [{"prompts_per_step": 1}, {"max_staleness": 2}, {"prompts_per_step": 2}])
async def test_where_batches_or_the_bound_became_smaller_what_has_no_place_is_made_again(
    start_executor: StartExecutor, events: EventLog, changed: dict[str, int]
) -> None:
    """Else it would be dropped when it is too old, and its prompts with it."""
    rollout = ONE_AHEAD["rollout"] | {"max_staleness": 4, "concurrency": 99}
    finished, there = set[str](), anyio.Event()

    def listen(line: dict[str, Any]) -> None:
        if line["kind"] == GroupFinished.kind:
            finished.add(line["group_id"])
            if len(finished) == 15:
                there.set()

    events.listen(listen)
    async with scripted_engine() as engine, start_executor(engine, rollout=rollout) as executor:
        engine.version = "0.0"
        executor.set_weight_version("0.0")
        executor.generate_ahead(0, 5)
        with anyio.fail_after(10):
            await there.wait()
        await executor.get(0)
        await executor.commit(0)
        files = await executor.save()
    async with scripted_engine() as engine, start_executor(engine, rollout=rollout | changed) as executor:
        await executor.restore(files, 1)
        trained: list[str] = []
        for step in range(1, 1 + 12 // (rollout | changed)["prompts_per_step"]):
            engine.version = f"1.{step}"
            executor.set_weight_version(engine.version)
            batch = await executor.get(step)
            Bound((rollout | changed)["max_staleness"], 1).check(batch)
            trained.extend(batch.group_ids)
            await executor.commit(step)
    assert sorted(trained) == [f"{ordinal:08d}" for ordinal in range(3, 15)]


async def test_groups_of_weights_that_were_rolled_back_are_issued_again(
    start_executor: StartExecutor, events: EventLog
) -> None:
    spans = (VersionSpan("0.0", 0, 1), VersionSpan("0.2", 1, 3))
    async with scripted_engine(held({"00000004"})) as engine:
        files = await saved_after_one_batch(start_executor, engine, events)
    state = msgspec.json.decode(files[STATE])
    state["finished"][0]["samples"][1]["sequences"][0][0]["versions"] = spans
    async with scripted_engine() as engine, start_executor(engine, **ONE_AHEAD) as executor:
        await executor.restore(files | {STATE: msgspec.json.encode(state)}, 1)
        engine.version = "1.1"
        executor.set_weight_version("1.1")
        batch = await executor.get(1)
        assert batch.group_ids == ("00000005", "00000003", "00000004")
        assert all(span.version != "0.2" for spans in batch.versions for span in spans)


async def test_longer_responses_that_leave_some_prompts_no_room_are_what_a_resume_complains_of(
    start_executor: StartExecutor,
) -> None:
    model = {"context_length": 13}  # of the 40 prompts 10 have four tokens and 30 have five
    async with scripted_engine() as engine, start_executor(engine, model=model) as executor:
        files = await executor.save()
    async with (
        scripted_engine() as engine,
        start_executor(engine, model=model, rollout={"max_new_tokens": 9}) as executor,
    ):
        with pytest.raises(
            DataError, match=r"size was 40, is 10. Prompts over 4 tokens .* now.* the limit was 5. Set rollo"
        ):
            await executor.restore(files, 0)


async def test_nothing_is_saved_once_generation_has_failed(start_executor: StartExecutor, events: EventLog) -> None:
    """Its groups are dropped by then: a checkpoint would skip their prompts."""

    def refuse(request: dict[str, Any], number: int) -> Action:
        return Action(fault="status", status=400) if number >= 6 else Action()

    dropped, failed = [], anyio.Event()

    def listen(line: dict[str, Any]) -> None:
        if line["kind"] == GroupDropped.kind:
            dropped.append(line["group_id"])
            if len(dropped) == 9:
                failed.set()

    events.listen(listen)
    async with scripted_engine(refuse) as engine, start_executor(engine, **ONE_AHEAD) as executor:
        await executor.get(0)
        await executor.commit(0)
        executor.generate_ahead(1, 9)
        with anyio.fail_after(10):
            await failed.wait()
        with pytest.raises(RolloutError, match="9 prompt groups failed"):
            await executor.save()
