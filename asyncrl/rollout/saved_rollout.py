"""The executor's part of a checkpoint: the place in the prompts, finished groups, and prompts to issue again.

Two files: `rollout.json`, and `rollout.safetensors` with the tokens and log-probs of all samples one after the other.
Prompts are not kept: a draw of the prompt stream is the same after a resume, which `PromptStream.restore` checks.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from asyncrl.config import Config
from asyncrl.data.prompt_stream import PromptStream
from asyncrl.data.sample import FinishReason, Sample, SampleGroup, TokenSequence, Turn, VersionSpan
from asyncrl.errors import CheckpointError
from asyncrl.observability.line_file import without_surrogates
from asyncrl.rollout.scheduling.group import Issue
from asyncrl.rollout.scheduling.ledger import Reached

STATE = "rollout.json"
TENSORS = "rollout.safetensors"
FORMAT = 3
"""Raised when a reader of the former number could not read the files."""

_SAMPLING = {"samples_per_prompt", "max_new_tokens", "temperature", "stop", "ignore_eos", "filters"}
_DTYPES = {"context_ids": np.int32, "output_ids": np.int32, "logprobs": np.float32}


@dataclass(frozen=True, slots=True)
class SavedRollout:
    """The executor between two batches."""

    prompts: Mapping[str, Any]
    """`PromptStream.state`."""
    again: tuple[Issue, ...]
    """Prompts whose groups were not finished, in the order in which they are to be issued."""
    finished: tuple[tuple[Issue, SampleGroup], ...]
    """Groups that no batch took yet, as admitted."""
    ended: Mapping[str, int]
    """Groups that ended, by state."""
    drop_reasons: Mapping[str, int]
    made_with: Mapping[str, Any]
    """Settings that decide what a group is, by key, as plain JSON types."""

    @property
    def reached(self) -> Reached:
        """Which groups had ended, and which had not."""
        issues = (*self.again, *(issue for issue, _ in self.finished))
        return Reached(self.prompts["ordinal"], {issue.ordinal: issue.issues for issue in issues})

    def under(self, settings: Mapping[str, Any]) -> tuple[SavedRollout, tuple[str, ...]]:
        """This state under other `settings` (`made_with`), and the keys of the settings that differ.

        Where one differs, finished groups are issued again: log-probs of another temperature would train something
        else, and samples of two kinds would be compared with each other.
        """
        keys = sorted(self.made_with.keys() | settings.keys())
        differing = tuple(key for key in keys if self.made_with.get(key) != settings.get(key))
        if not differing:
            return self, ()
        again = (*(issue for issue, _ in self.finished), *self.again)
        return replace(self, again=again, finished=(), made_with=settings), differing


def made_with(config: Config) -> dict[str, Any]:
    """The settings that decide what a group is: how it was sampled and how it was scored."""
    rollout = config.rollout.model_dump(mode="json", include=_SAMPLING)
    reward = config.reward.model_dump(mode="json", include={"function", "args", "scope"})
    return {f"rollout.{key}": value for key, value in rollout.items()} | {
        f"reward.{key}": value for key, value in reward.items()
    }


class _Turn(msgspec.Struct, frozen=True):
    context_tokens: int
    output_tokens: int
    versions: tuple[VersionSpan, ...]


class _Sample(msgspec.Struct, frozen=True):
    sample_id: str
    sequences: tuple[tuple[_Turn, ...], ...]
    finish_reason: FinishReason
    text: str
    reward: float | None
    failure: str | None
    reward_parts: dict[str, float] = {}  # not in checkpoints from before rewards had parts


class _Group(msgspec.Struct, frozen=True):
    ordinal: int
    issues: int
    samples: tuple[_Sample, ...]


class _State(msgspec.Struct, frozen=True):
    format: int
    prompts: dict[str, Any]
    again: tuple[tuple[int, int], ...]
    """(ordinal, issues)."""
    finished: tuple[_Group, ...]
    ended: dict[str, int]
    drop_reasons: dict[str, int]
    made_with: dict[str, Any]


def encode_rollout(saved: SavedRollout) -> dict[str, bytes]:
    """The files, by name."""
    state = _State(
        format=FORMAT,
        prompts=dict(saved.prompts),
        again=tuple((issue.ordinal, issue.issues) for issue in saved.again),
        finished=tuple(_group(issue, group) for issue, group in saved.finished),
        ended=dict(saved.ended),
        drop_reasons=dict(saved.drop_reasons),
        made_with=dict(saved.made_with),
    )
    turns = [turn for _, group in saved.finished for sample in group.samples for turn in sample.turns]
    tensors = {
        name: np.concatenate([np.empty(0, dtype), *(getattr(turn, name) for turn in turns)], dtype=dtype)
        for name, dtype in _DTYPES.items()
    }
    try:
        text = msgspec.json.encode(state)
    except UnicodeEncodeError:  # the message of a reward or a filter need not be valid text
        text = msgspec.json.encode(without_surrogates(msgspec.to_builtins(state)))
    return {STATE: text, TENSORS: safetensors.save(tensors)}


def decode_rollout(files: Mapping[str, bytes], stream: PromptStream) -> SavedRollout:
    """Reads the files of `encode_rollout`, and moves `stream` to its place.

    Raises CheckpointError for files that are missing or of another kind, DataError for other data.
    """
    missing = {STATE, TENSORS} - files.keys()
    if missing:
        raise CheckpointError(
            f"the checkpoint has no {', '.join(sorted(missing))}, so it does not tell which prompts were trained; "
            "save what `RolloutExecutor.save` returns with it, or begin anew with checkpoint.resume = never"
        )
    try:
        version = msgspec.json.decode(files[STATE], type=dict[str, object]).get("format")
        if version != FORMAT:
            raise CheckpointError(f"{STATE} has format {version}; this version of asyncrl reads format {FORMAT}")
        state = msgspec.json.decode(files[STATE], type=_State)
        tensors = safetensors.load(files[TENSORS])
    except (msgspec.DecodeError, SafetensorError) as error:
        raise CheckpointError(f"the rollouts of the checkpoint are damaged: {error}") from None
    turns = [
        turn
        for group in state.finished
        for sample in group.samples
        for sequence in sample.sequences
        for turn in sequence
    ]
    lengths = {
        "context_ids": sum(turn.context_tokens for turn in turns),
        "output_ids": (tokens := sum(turn.output_tokens for turn in turns)),
        "logprobs": tokens,
    }
    found = {name: tensor.size for name, tensor in tensors.items()}
    if found != lengths:
        raise CheckpointError(f"{TENSORS} holds {found}, and {STATE} tells of {lengths}")
    stream.restore(state.prompts)
    reader = _Reader(tensors)
    return SavedRollout(
        prompts=state.prompts,
        again=tuple(_issue(stream, ordinal, issues) for ordinal, issues in state.again),
        finished=tuple(reader.group(_issue(stream, group.ordinal, group.issues), group) for group in state.finished),
        ended=state.ended,
        drop_reasons=state.drop_reasons,
        made_with=state.made_with,
    )


def _group(issue: Issue, group: SampleGroup) -> _Group:
    samples = tuple(
        _Sample(
            sample_id=sample.sample_id,
            sequences=tuple(
                tuple(_Turn(len(turn.context_ids), len(turn.output_ids), turn.versions) for turn in sequence.turns)
                for sequence in sample.sequences
            ),
            finish_reason=sample.finish_reason,
            text=sample.text,
            reward=sample.reward,
            failure=sample.failure,
            reward_parts=sample.reward_parts,
        )
        for sample in group.samples
    )
    return _Group(issue.ordinal, issue.issues, samples)


def _issue(stream: PromptStream, ordinal: int, issues: int) -> Issue:
    return Issue.of(stream.at(ordinal), issues)


class _Reader:
    """Cuts the arrays of one turn after the other out of the tensors."""

    def __init__(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        self._tensors = tensors
        self._at = dict.fromkeys(_DTYPES, 0)

    def group(self, issue: Issue, saved: _Group) -> tuple[Issue, SampleGroup]:
        samples = tuple(self._sample(issue.group_id, sample) for sample in saved.samples)
        return issue, SampleGroup(issue.group_id, issue.prompt, samples)

    def _sample(self, group_id: str, saved: _Sample) -> Sample:
        return Sample(
            sample_id=saved.sample_id,
            group_id=group_id,
            sequences=tuple(TokenSequence(tuple(map(self._turn, turns))) for turns in saved.sequences),
            finish_reason=saved.finish_reason,
            text=saved.text,
            reward=saved.reward,
            failure=saved.failure,
            reward_parts=saved.reward_parts,
        )

    def _turn(self, saved: _Turn) -> Turn:
        return Turn(
            context_ids=self._next("context_ids", saved.context_tokens),
            output_ids=self._next("output_ids", saved.output_tokens),
            logprobs=self._next("logprobs", saved.output_tokens),
            versions=saved.versions,
        )

    def _next(self, name: str, count: int) -> NDArray[Any]:
        start = self._at[name]
        self._at[name] = start + count
        return self._tensors[name][start : start + count].astype(_DTYPES[name])
