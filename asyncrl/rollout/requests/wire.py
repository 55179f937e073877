"""The engine's /generate as bytes: requests encoded, answers decoded and checked. No I/O.

Invariants
- Token ids and log-probs are the engine's own; nothing is tokenised again.
- An answer passes only if it can be what was sampled: ids within the vocabulary, as many finite log-probs, version
  spans that cover every token and none of them torn.

Only the fields that are used are decoded: msgspec skips the others without building objects. An answer of 1,000 tokens
costs some 0.2 ms of the event loop, most of the cost of a sample, so the way of decoding was chosen by measurement.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.data.sample import FinishReason, VersionSpan
from asyncrl.rollout.requests.retry import RequestFault

TORN_PREFIX = "torn:"
"""Version stamp of an engine in the middle of a weight update."""
_MAX_DETAIL = 300  # characters of an error body that are kept


class AttemptFailed(Exception):
    """One attempt of a request failed."""

    def __init__(self, kind: RequestFault, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
        self.retry_after_s: float | None = None
        """Seconds before which, as the answer says, another attempt is of no use."""
        self.partial: Generation | None = None
        """The tokens that an aborted request had generated."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a response is sampled."""

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def encode(self) -> msgspec.Raw:
        """The JSON object `sampling_params`; no stop tokens with ignore_eos, since the engine ignores them then."""
        params: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "skip_special_tokens": False,  # a response may be made of them: `<think>`, tags of tools
        }
        if self.ignore_eos:
            params["ignore_eos"] = True
        else:
            params["stop_token_ids"] = self.stop_token_ids
        return msgspec.Raw(msgspec.json.encode(params))


class Generation(msgspec.Struct, frozen=True, gc=False):
    """One response as sampled."""

    output_ids: NDArray[np.int32]
    """int32 [tokens], read-only."""
    logprobs: NDArray[np.float32]
    """float32 [tokens], read-only."""
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    text: str
    """Text of all tokens, without the one that stopped the response."""


class _Request(msgspec.Struct):
    rid: str
    input_ids: msgspec.Raw
    sampling_params: msgspec.Raw
    return_logprob: bool = True
    stream: bool = False
    extra_key: str | msgspec.UnsetType = msgspec.UNSET


class _Finish(msgspec.Struct):
    type: FinishReason
    message: str | None = None
    status_code: int | None = None


TokenId = TypeVar("TokenId", bound=int)
"""An id within the vocabulary; the decoder checks it."""


class _Token(msgspec.Struct, array_like=True, gc=False):
    """`[logprob, id, text]`, of which only the first is read: the engine repeats the ids as `output_ids`.

    Thousands live for an instant: the garbage collector must not visit them.
    """

    logprob: float


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    output_token_logprobs: list[_Token] = []
    weight_version: str = ""
    weight_versions: list[VersionSpan] | None = None


class _Answer(msgspec.Struct, Generic[TokenId]):
    text: str
    meta_info: _Meta
    output_ids: list[TokenId] = []  # an aborted request may have none


_ENCODER = msgspec.json.Encoder()


@cache
def _decoder(vocab_size: int) -> msgspec.json.Decoder[_Answer[int]]:
    return msgspec.json.Decoder(_Answer[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]])


def encode_prompt(token_ids: NDArray[np.int32], vocab_size: int) -> msgspec.Raw:
    """The JSON array `input_ids`; ValueError for an id outside the engine's embedding, which would kill the engine."""
    if len(token_ids) == 0 or int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
        raise ValueError(f"token ids must be in [0, {vocab_size}) and at least one")
    return msgspec.Raw(_ENCODER.encode(token_ids.tolist()))


def encode_request(
    rid: str, input_ids: msgspec.Raw, sampling_params: msgspec.Raw, extra_key: str | None = None
) -> bytes:
    """The body of a request. Only requests with the same `extra_key` share KV in the engine's prefix cache."""
    return _ENCODER.encode(
        _Request(rid, input_ids, sampling_params, extra_key=msgspec.UNSET if extra_key is None else extra_key)
    )


def attribute_steps_in_flight(versions: Sequence[VersionSpan], sent_under: str | None) -> tuple[VersionSpan, ...]:
    """Spans that never name newer weights than those that made a token, for engines that are paused in place.

    An engine may prepare a decoding step while the last one is computed. Such a step is in flight during the pause: the
    old weights make its token, and the engine stamps it with the new ones. So the first token of each span counts with
    the span before it, and the first token of all with the weights that the request was sent under (`sent_under`).
    """
    shifted: list[VersionSpan] = []
    before = sent_under if sent_under is not None or not versions else versions[0].version
    for span in versions:
        assert before is not None
        for version, start, end in ((before, span.start, span.start + 1), (span.version, span.start + 1, span.end)):
            if end > start and shifted and shifted[-1].version == version:
                shifted[-1] = VersionSpan(version, shifted[-1].start, end)
            elif end > start:
                shifted.append(VersionSpan(version, start, end))
        before = span.version
    return tuple(shifted)


def decode_answer(status: int, body: bytes, vocab_size: int) -> Generation:
    """The generation in an HTTP answer. Raises AttemptFailed with the kind of failure."""
    if status != 200:
        raise AttemptFailed(_kind_of_status(status), f"HTTP {status}: {_error_text(body)}")
    try:
        answer = _decoder(vocab_size).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AttemptFailed(RequestFault.MALFORMED, f"{error}; body begins {_error_text(body[:100])!r}") from error
    finish = answer.meta_info.finish_reason
    if finish.type != "abort":
        return _generation(answer)
    kind = RequestFault.ABORTED if finish.status_code is None else _kind_of_status(finish.status_code)
    failure = AttemptFailed(kind, finish.message or "aborted by the engine")
    with suppress(AttemptFailed):  # of no use
        failure.partial = _generation(answer) if kind is RequestFault.ABORTED else None
    raise failure


def _generation(answer: _Answer[int]) -> Generation:
    """The checked generation; AttemptFailed for an answer that cannot be what was sampled."""
    meta, ids = answer.meta_info, answer.output_ids
    if not ids or len(ids) != len(meta.output_token_logprobs):
        raise AttemptFailed(
            RequestFault.MALFORMED, f"{len(ids)} tokens with {len(meta.output_token_logprobs)} log-probs"
        )
    return Generation(
        _int32(ids),
        _float32(meta.output_token_logprobs),
        meta.finish_reason.type,
        _versions(meta, len(ids)),
        answer.text,
    )


def _int32(values: list[int]) -> NDArray[np.int32]:
    """The ids as an array: `struct` reads a list three times as fast as numpy."""
    return np.frombuffer(struct.pack(f"<{len(values)}i", *values), "<i4")


def _float32(tokens: list[_Token]) -> NDArray[np.float32]:
    """The log-probs; AttemptFailed for one that float32 cannot hold. JSON has no infinities, so all are finite."""
    try:
        packed = struct.pack(f"<{len(tokens)}f", *[token.logprob for token in tokens])
    except (struct.error, OverflowError) as error:
        raise AttemptFailed(RequestFault.MALFORMED, f"log-probs out of range: {error}") from error
    return np.frombuffer(packed, "<f4")


def _versions(meta: _Meta, count: int) -> tuple[VersionSpan, ...]:
    """Spans that cover [0, count) without a gap; one span of `weight_version` where the engine lists none."""
    if meta.weight_versions is None:
        spans: tuple[VersionSpan, ...] = (VersionSpan(meta.weight_version, 0, count),)
    else:
        spans = tuple(span for span in meta.weight_versions if span.end > span.start)
    at = 0
    for span in spans:
        if span.start != at:
            raise AttemptFailed(RequestFault.MALFORMED, f"weight versions leave token {at} out: {spans}")
        if span.version.startswith(TORN_PREFIX):
            raise AttemptFailed(
                RequestFault.MALFORMED, f"tokens {span.start}-{span.end} were made by torn weights {span.version}"
            )
        at = span.end
    if at != count:
        raise AttemptFailed(RequestFault.MALFORMED, f"weight versions cover {at} of {count} tokens")
    return spans


def _kind_of_status(status: int) -> RequestFault:
    if status in (408, 429, 503):
        return RequestFault.BUSY
    return RequestFault.SERVER_ERROR if status >= 500 or status < 400 else RequestFault.REFUSED


def _error_text(body: bytes) -> str:
    """The message inside an error body of one of the usual shapes."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode(errors="replace")[:_MAX_DETAIL]
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and key in value:
            value = value[key]
    return str(value)[:_MAX_DETAIL]
