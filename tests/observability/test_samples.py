"""Samples as text: what a run keeps, and how they are shown."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncrl.config.sections.shown import SamplesConfig
from asyncrl.data.sample import Prompt, Sample, SampleGroup, TokenSequence, Turn, VersionSpan
from asyncrl.errors import RunDirectoryError
from asyncrl.observability.samples.listing import show_samples
from asyncrl.observability.samples.log import SampleLog, spread


def turn(*output: int, context: tuple[int, ...] = (7,), version: str = "0.1") -> Turn:
    ids = np.array(output, np.int32)
    spans = (VersionSpan(version, 0, len(ids)),)
    return Turn(np.array(context, np.int32), ids, np.zeros(len(ids), np.float32), spans)


def group(number: int, *rewards: float | None, text: str = "4", turns: tuple[Turn, ...] | None = None) -> SampleGroup:
    prompt = Prompt(f"train.jsonl:{number}", f"{number}+1=", np.array([7], np.int32), answer=str(number + 1))
    samples = tuple(
        Sample(
            f"{number:08d}.{i}",
            f"{number:08d}",
            (TokenSequence(turns or (turn(*range(i + 1)),)),),
            "stop",
            text,
            reward=reward,
            failure="ValueError: odd" if reward is None else None,
        )
        for i, reward in enumerate(rewards)
    )
    return SampleGroup(f"{number:08d}", prompt, samples)


def log(run_dir: Path, attempt: int = 0, **settings: Any) -> SampleLog:
    return SampleLog(run_dir, SamplesConfig(**settings), attempt, lambda ids: " ".join(map(str, ids)))


def lines(run_dir: Path, name: str = "samples.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def shown(run_dir: Path, **how: Any) -> str:
    stream = io.StringIO()
    show_samples(run_dir, stream=stream, **how)
    return stream.getvalue()


def test_a_kept_sample_tells_all_that_is_known_of_it(tmp_path: Path) -> None:
    log(tmp_path).keep_step(3, [group(1, 0.5, None)])
    scored, failed = lines(tmp_path)
    assert scored.pop("time") > 1e9
    assert scored == {
        "kind": "train", "step": 3, "attempt": 0, "sample_id": "00000001.0", "group_id": "00000001",
        "prompt_id": "train.jsonl:1", "prompt": "1+1=", "response": "4", "answer": "2", "reward": 0.5,
        "finish_reason": "stop", "tokens": 1, "versions": ["0.1"], "failure": None,
    }  # fmt: skip
    assert failed["reward"] is None and failed["failure"] == "ValueError: odd"


def test_the_parts_of_a_reward_are_kept_with_its_sample(tmp_path: Path) -> None:
    made = group(1, 1.25)
    (sample,) = made.samples
    sample = replace(sample, reward_parts={"correct": 1.0, "format": 0.25})
    log(tmp_path).keep_step(1, [SampleGroup(made.group_id, made.prompt, (sample,))])
    (record,) = lines(tmp_path)
    assert record["reward_parts"] == {"correct": 1.0, "format": 0.25}
    assert "correct" in shown(tmp_path) and "format" in shown(tmp_path)


def test_a_sample_of_several_turns_is_kept_turn_by_turn(tmp_path: Path) -> None:
    turns = (turn(1, 2, version="0.1"), turn(4, context=(8, 9), version="0.2"))
    log(tmp_path).keep_step(1, [group(1, 1.0, turns=turns)])
    (record,) = lines(tmp_path)
    assert record["turns"] == [{"read": "7", "sampled": "1 2"}, {"read": "8 9", "sampled": "4"}]
    assert record["versions"] == ["0.1", "0.2"]
    text = shown(tmp_path)
    assert "weights 0.1 then 0.2" in text and text.index("read") < text.index("said")


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 60), st.integers(0, 39))
def test_samples_of_a_step_are_spread_and_one_that_failed_is_among_them(
    sizes: list[int], count: int, failed: int
) -> None:
    rewards: list[float | None] = [1.0] * sum(sizes)
    if failed < len(rewards):
        rewards[failed] = None
    groups = [group(i, *(rewards.pop() for _ in range(size))) for i, size in enumerate(sizes)]
    chosen = [sample for _, sample in spread(groups, count)]
    assert len(chosen) == min(count, sum(sizes)) == len({sample.sample_id for sample in chosen})
    assert any(sample.failure for sample in chosen) == (failed < sum(sizes) and count > 0)
    if count >= 2 * len(sizes) and len(set(sizes)) == 1:
        assert {sample.group_id for sample in chosen} == {group.group_id for group in groups}


def test_all_samples_of_an_evaluation_are_kept_unless_a_setting_says_otherwise(tmp_path: Path) -> None:
    groups = [group(i, 1.0, 0.0) for i in range(40)]
    log(tmp_path).keep_evaluation(0, groups)
    assert len(lines(tmp_path)) == 80
    log(tmp_path, per_evaluation=3).keep_evaluation(5, groups)
    log(tmp_path, per_evaluation=0, per_step=0).keep_evaluation(6, groups)
    log(tmp_path, per_step=0).keep_step(6, groups)
    assert [line["step"] for line in lines(tmp_path)[80:]] == [5, 5, 5]


def test_a_file_that_has_grown_makes_room_for_a_new_one(tmp_path: Path) -> None:
    kept = log(tmp_path, max_megabytes=0.001)
    for step in range(1, 30):
        kept.keep_step(step, [group(step, 1.0)])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3_000
    assert "step 29" in shown(tmp_path) and "step 28" in shown(tmp_path, step=28)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["samples.1.jsonl", "samples.jsonl"]


def test_a_file_that_cannot_be_written_costs_samples_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").mkdir()
    kept = log(tmp_path)
    kept.keep_step(1, [group(1, 1.0)])
    (tmp_path / "samples.jsonl").rmdir()
    kept.keep_step(2, [group(2, 1.0)])
    assert [line["step"] for line in lines(tmp_path)] == [2]


def test_the_list_shows_the_latest_step_or_another_one_by_reward(tmp_path: Path) -> None:
    kept = log(tmp_path)
    kept.keep_evaluation(0, [group(9, 1.0)])
    kept.keep_step(1, [group(1, 0.0)])
    kept.keep_step(2, [group(2, 0.0, 1.0, None, 0.5)])
    heads = [line.split("  ") for line in shown(tmp_path, order="reward").splitlines() if line.startswith("step")]
    assert [head[0] for head in heads] == ["step 2"] * 4
    assert [head[2] for head in heads] == ["reward 1.000", "reward 0.500", "reward 0.000", "no reward"]
    longest = shown(tmp_path, order="tokens", limit=1)
    assert "4 tokens" in longest and "3 more" in longest
    assert shown(tmp_path, step=1).startswith("step 1  train.jsonl:1  reward 0.000")
    evaluated = shown(tmp_path, kind="eval")
    assert evaluated.startswith("evaluation after step 0") and "answer   10" in evaluated


def test_a_step_that_was_trained_again_shows_its_last_attempt(tmp_path: Path) -> None:
    log(tmp_path, 0).keep_step(1, [group(1, 0.0)])
    log(tmp_path, 1).keep_step(1, [group(1, 1.0)])
    assert "reward 1.000" in shown(tmp_path, step=1) and "reward 0.000" not in shown(tmp_path, step=1)


def test_a_response_does_not_drive_the_readers_terminal(tmp_path: Path) -> None:
    log(tmp_path).keep_step(1, [group(1, 1.0, text="a\x1b[2J\rb\nsecond 漢\u3000字 [bold]x")])
    text = shown(tmp_path)
    assert "\x1b" not in text and "\r" not in text
    assert "a\\x1b[2J\\rb" in text and "second 漢\u3000字 [bold]x" in text


def test_what_was_not_kept_is_told_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"no samples\.jsonl in it"):
        show_samples(tmp_path)
    log(tmp_path).keep_step(4, [group(1, 1.0)])
    with pytest.raises(RunDirectoryError, match="no sample of any evaluation was kept so far"):
        show_samples(tmp_path, kind="eval")
    with pytest.raises(RunDirectoryError, match=r"no sample of step 9 was kept; .* the nearest 4"):
        show_samples(tmp_path, step=9)
