"""What driver and reward worker send each other: length-prefixed msgpack frames over a unix socket.

    driver → Setup            worker → Started(error)    once, after importing the function
    driver → ScoreCall        worker → ScoreOutcome      one at a time, with the number of the call

Arrays travel as raw bytes. Nothing is pickled. The function that runs in the worker may do anything with its socket:
the driver believes a frame only if it is an answer to the call that was sent.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from asyncrl.data.sample import FinishReason, Prompt, Sample, TokenSequence, Turn, VersionSpan
from asyncrl.rollout.rewards.result import RewardScope, Score

HEADER = struct.Struct("<I")
"""Length of the frame that follows, in bytes."""
LONGEST_ANSWER_BYTES = 1 << 20
"""Longest frame of a worker: a number or one line of text for each sample of a group."""


class Setup(msgspec.Struct):
    """Which function to import, and from where: the worker looks where the driver looks."""

    function: str
    args: dict[str, Any]
    scope: RewardScope
    directory: str
    import_path: list[str]
    models: dict[str, str]
    """Urls of the models of [models.NAME], by name."""


class Started(msgspec.Struct):
    """The function was imported, or why not."""

    error: str | None


class TurnFrame(msgspec.Struct):
    """A Turn, its arrays as raw bytes."""

    context_ids: bytes
    output_ids: bytes
    logprobs: bytes
    versions: tuple[VersionSpan, ...]


class SampleFrame(msgspec.Struct):
    """A Sample that was generated and not scored."""

    sample_id: str
    sequences: list[list[TurnFrame]]
    finish_reason: FinishReason
    text: str


class ScoreCall(msgspec.Struct):
    """The samples that one call scores, and their prompt."""

    number: int
    """Counts the calls of a worker."""
    group_id: str
    samples: list[SampleFrame]
    prompt_id: str
    prompt_text: str
    prompt_ids: bytes
    answer: str | None
    record: dict[str, Any]


class ScoreOutcome(msgspec.Struct):
    """The scores of one call, in the order of its samples."""

    number: int
    scores: tuple[Score, ...]


def frame(message: msgspec.Struct) -> bytes:
    """Header and body. Raises TypeError for a record that holds what msgpack cannot carry."""
    body = msgspec.msgpack.encode(message, enc_hook=_array_to_list)
    return HEADER.pack(len(body)) + body


def call_of(number: int, samples: Sequence[Sample], prompt: Prompt) -> ScoreCall:
    """What is sent to have `samples` (at least one, of one group) scored."""
    return ScoreCall(
        number=number,
        group_id=samples[0].group_id,
        samples=[
            SampleFrame(
                sample.sample_id,
                [[_framed(turn) for turn in sequence.turns] for sequence in sample.sequences],
                sample.finish_reason,
                sample.text,
            )
            for sample in samples
        ],
        prompt_id=prompt.prompt_id,
        prompt_text=prompt.text,
        prompt_ids=prompt.token_ids.tobytes(),
        answer=prompt.answer,
        record=prompt.record,
    )


def samples_and_prompt(call: ScoreCall) -> tuple[tuple[Sample, ...], Prompt]:
    """What `call_of` was given."""
    samples = tuple(
        Sample(
            sample.sample_id,
            call.group_id,
            tuple(TokenSequence(tuple(_turn(frame) for frame in frames)) for frames in sample.sequences),
            sample.finish_reason,
            sample.text,
        )
        for sample in call.samples
    )
    prompt_ids = np.frombuffer(call.prompt_ids, np.int32)
    return samples, Prompt(call.prompt_id, call.prompt_text, prompt_ids, call.answer, call.record)


def _framed(turn: Turn) -> TurnFrame:
    return TurnFrame(turn.context_ids.tobytes(), turn.output_ids.tobytes(), turn.logprobs.tobytes(), turn.versions)


def _turn(frame: TurnFrame) -> Turn:
    return Turn(
        np.frombuffer(frame.context_ids, np.int32),
        np.frombuffer(frame.output_ids, np.int32),
        np.frombuffer(frame.logprobs, np.float32),
        frame.versions,
    )


def _array_to_list(value: Any) -> Any:
    """numpy values of a record (datasets and user functions make them) as plain ones."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a record field of type {type(value).__name__} cannot be sent to a reward worker")
