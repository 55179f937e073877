"""What driver and reward worker say to each other: length-prefixed msgpack frames over a unix socket.

    worker → Started(error)            once, after importing the function
    driver → Setup                     first
    driver → ScoreCall        worker → ScoreOutcome      one at a time, with the number of the job

Arrays travel as raw bytes. Nothing is pickled. The function that runs in the worker may do anything with its socket:
what comes back is believed only if it is an answer to the job that was sent.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np

from asyncrl.data.sample import FinishReason, Prompt, Sample, TokenSequence, Turn, VersionSpan

HEADER = struct.Struct("<I")
"""Length of the frame that follows, in bytes."""
LONGEST_ANSWER_BYTES = 1 << 20
"""Of a worker's frames, which hold a number or one line of text, in any case."""


class Setup(msgspec.Struct):
    """Which function to import, and from where: the worker looks where the driver looks."""

    function: str
    args: dict[str, Any]
    directory: str
    import_path: list[str]


class Started(msgspec.Struct):
    error: str | None


class TurnFrame(msgspec.Struct):
    """A Turn, its arrays as raw bytes."""

    context_ids: bytes
    output_ids: bytes
    logprobs: bytes
    versions: tuple[VersionSpan, ...]


class ScoreCall(msgspec.Struct):
    """One sample with its prompt."""

    number: int
    """Counts the jobs of a worker."""
    sample_id: str
    group_id: str
    sequences: list[list[TurnFrame]]
    finish_reason: FinishReason
    text: str
    prompt_id: str
    prompt_text: str
    answer: str | None
    record: dict[str, Any]


class ScoreOutcome(msgspec.Struct):
    number: int
    reward: float | None
    failure: str | None


def frame(message: msgspec.Struct) -> bytes:
    """Header and body. Raises TypeError for a record that holds what msgpack cannot carry."""
    body = msgspec.msgpack.encode(message, enc_hook=_array_to_list)
    return HEADER.pack(len(body)) + body


def job_of(number: int, sample: Sample, prompt: Prompt) -> ScoreCall:
    return ScoreCall(
        number=number,
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        sequences=[[_framed(turn) for turn in sequence.turns] for sequence in sample.sequences],
        finish_reason=sample.finish_reason,
        text=sample.text,
        prompt_id=prompt.prompt_id,
        prompt_text=prompt.text,
        answer=prompt.answer,
        record=prompt.record,
    )


def sample_and_prompt(job: ScoreCall) -> tuple[Sample, Prompt]:
    sequences = tuple(TokenSequence(tuple(_turn(frame) for frame in frames)) for frames in job.sequences)
    sample = Sample(job.sample_id, job.group_id, sequences, job.finish_reason, job.text)
    return sample, Prompt(job.prompt_id, job.prompt_text, sample.prompt_ids, job.answer, job.record)


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
