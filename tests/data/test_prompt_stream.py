from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.prompt_stream import PromptStream
from asyncrl.data.sample import Prompt
from asyncrl.errors import DataError


def prompts(count: int, prefix: str = "p") -> list[Prompt]:
    return [Prompt(f"{prefix}:{i}", str(i), np.array([i], np.int32)) for i in range(count)]


def drawn(stream: PromptStream, count: int) -> list[str]:
    return [stream.draw().prompt.prompt_id for _ in range(count)]


@given(size=st.integers(1, 40), epochs=st.integers(1, 4), seed=st.integers(0, 2**70), shuffle=st.booleans())
def test_each_epoch_draws_every_prompt_once(size: int, epochs: int, seed: int, shuffle: bool) -> None:
    stream = PromptStream(prompts(size), seed=seed, shuffle=shuffle)
    draws = [stream.draw() for _ in range(size * epochs)]
    assert [d.ordinal for d in draws] == list(range(size * epochs))
    for epoch in range(epochs):
        ids = Counter(d.prompt.prompt_id for d in draws if d.epoch == epoch)
        assert ids == Counter(p.prompt_id for p in prompts(size))


@given(size=st.integers(1, 30), before=st.integers(0, 70), after=st.integers(1, 70), seed=st.integers(0, 5))
def test_a_restored_stream_continues_as_if_it_had_never_stopped(size: int, before: int, after: int, seed: int) -> None:
    stream = PromptStream(prompts(size), seed=seed, shuffle=True)
    drawn(stream, before)
    state = json.loads(json.dumps(stream.state()))
    resumed = PromptStream(prompts(size), seed=seed, shuffle=True)
    resumed.restore(state)
    assert [resumed.draw().ordinal for _ in range(1)] == [before]
    resumed.restore(state)
    assert drawn(resumed, after) == drawn(stream, after)


def test_epochs_and_seeds_differ_in_order_and_are_fixed_for_ever() -> None:
    stream = PromptStream(prompts(8), seed=0, shuffle=True)
    first, second = drawn(stream, 8), drawn(stream, 8)
    assert first != second != [p.prompt_id for p in prompts(8)]
    assert first == ["p:3", "p:2", "p:1", "p:6", "p:0", "p:7", "p:4", "p:5"], "a resume on another machine relies on it"
    assert drawn(PromptStream(prompts(8), seed=1, shuffle=True), 8) != first


@pytest.mark.parametrize("other", [{"size": 5}, {"seed": 1}, {"shuffle": False}, {"prefix": "q"}])
def test_a_cursor_of_other_data_is_refused(other: dict[str, object]) -> None:
    def stream(size: int = 4, seed: int = 0, shuffle: bool = True, prefix: str = "p") -> PromptStream:
        return PromptStream(prompts(size, prefix), seed=seed, shuffle=shuffle)

    with pytest.raises(DataError, match="does not fit"):
        stream(**other).restore(stream().state())  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"token_ids": np.array([9], np.int32)}, {"answer": "7"}])
def test_a_cursor_is_refused_where_a_prompt_or_its_answer_was_changed_in_place(change: dict[str, Any]) -> None:
    """The ids stay the same, because they are line numbers."""
    edited = prompts(4)
    edited[2] = replace(edited[2], **change)
    with pytest.raises(DataError, match="prompts, answers or their order have changed"):
        PromptStream(edited, seed=0, shuffle=True).restore(PromptStream(prompts(4), seed=0, shuffle=True).state())


def test_where_other_prompts_are_too_long_now_the_settings_that_decide_it_are_named() -> None:
    def stream(longest: int, size: int = 4) -> PromptStream:
        return PromptStream(prompts(size), seed=0, shuffle=True, max_prompt_tokens=longest)

    state = stream(20).state()
    stream(12).restore(state)  # no prompt is that long
    with pytest.raises(
        DataError, match=r"over 12 tokens .* now.* the limit was 20\. Set rollout\.max_new_tokens, model\.c"
    ):
        stream(12, size=3).restore(state)
    with pytest.raises(DataError, match="resume with the data and seed"):
        stream(20, size=3).restore(state)
    del state["max_prompt_tokens"]  # as saved by an earlier version
    with pytest.raises(DataError, match="resume with the data and seed"):
        stream(12, size=3).restore(state)


def test_a_stream_without_prompts_has_nothing_to_draw() -> None:
    empty = PromptStream([], seed=0, shuffle=True)
    assert (len(empty), empty.epoch) == (0, 0)
    with pytest.raises(DataError, match=r"data\.source is not set"):
        empty.draw()


def test_rollouts_per_epoch_are_whole_batches() -> None:
    stream = PromptStream(prompts(10), seed=0, shuffle=False)
    assert stream.num_rollouts_per_epoch(3) == 3
    with pytest.raises(DataError, match="10 prompts cannot fill one batch"):
        stream.num_rollouts_per_epoch(11)
