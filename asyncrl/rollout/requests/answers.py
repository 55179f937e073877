"""What comes back from the engine's /generate: decoded, and believed only if it can be what was sampled. No I/O.

An answer passes only if it can be the answer to its request
- it has the id of the request, and as many tokens as were asked for at most;
- its ids are within the vocabulary, and the same beside the log-probs; none after which the engine had to stop is
  followed by another;
- each log-prob is that of a token which can be drawn;
- version spans cover every token, and none of them is torn. Which versions were published, the client knows.

Anything else is one `Defect`. So are bytes that are no answer at all. Whatever an engine sends, nothing but
AttemptFailed is raised.

Only the fields that are used are decoded: msgspec skips the others without building objects. An answer of 1,000 tokens
costs some 0.2 ms of the event loop, most of the cost of a sample, so the way of decoding was chosen by measurement.
"""

from __future__ import annotations

import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.data.fleet import read_stamp
from asyncrl.data.sample import FinishReason, VersionSpan
from asyncrl.errors import counted
from asyncrl.rollout.requests.retry import RequestFault
from asyncrl.rollout.requests.wire import Generation, SamplingParams

TORN_PREFIX = "torn:"
"""Version stamp of an engine in the middle of a weight update."""
LOWEST_LOGPROB = -104.0
"""Log-prob of a token whose probability is 0 in float32, in which engines draw: nothing below can have been drawn."""
HIGHEST_LOGPROB = 1e-3
"""0, and room for rounding: no probability is over 1."""
_MAX_DETAIL = 300  # characters of an error body that are kept
_STAMP = re.compile(rb'"weight_version"\s*:\s*"([^"\\]*)"')


class Defect(StrEnum):
    """Why an answer cannot be what the engine sampled for this request."""

    UNREADABLE = "no answer can be read"
    FOREIGN = "it answers another request"
    LENGTH = "no tokens, or more than were asked for"
    IDS = "the ids and those beside the log-probs differ"
    LOGPROBS = "a log-prob that no token can have"
    END = "the end does not fit the tokens"
    VERSIONS = "the weights that made the tokens are not told"
    UNPUBLISHED = "weights made it that nobody published"


class AttemptFailed(Exception):
    """One attempt of a request failed."""

    def __init__(self, kind: RequestFault, detail: str, defect: Defect | None = None, engine: str = "") -> None:
        """`defect` is that of a malformed answer; `engine` the id of the engine that answered, where it is known."""
        by = f" (answer of {engine})" if engine else ""
        self.kind = kind
        self.detail = (detail if defect is None else f"{defect}: {detail}") + by
        super().__init__(f"{kind}: {self.detail}")
        self.defect = defect
        self.engine = engine
        self.retry_after_s: float | None = None
        """Seconds before which, as the answer says, another attempt is of no use."""
        self.partial: Generation | None = None
        """The tokens that an aborted request had generated."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asked for: its answer is judged by it."""

    rid: str
    sampling: SamplingParams
    vocab_size: int
    """Token ids are below it."""
    owner: str | None = None
    """Name of the job, which engines that outlive it bear in their stamps."""


class _Finish(msgspec.Struct):
    type: FinishReason
    message: str | None = None
    status_code: int | None = None
    matched: int | str | list[int] | None = None
    """Stop token or stop string. An engine whose logits are NaN says `NaN happened` here, and makes an id up."""


TokenId = TypeVar("TokenId", bound=int)
"""An id within the vocabulary; the decoder checks it."""


class _Token(msgspec.Struct, Generic[TokenId], array_like=True, gc=False):
    """`[logprob, id, text]`, of which the text is not read.

    Thousands live for an instant: the garbage collector must not visit them.
    """

    logprob: float
    id: TokenId


class _Meta(msgspec.Struct, Generic[TokenId]):
    finish_reason: _Finish
    id: str = ""
    output_token_logprobs: list[_Token[TokenId]] = []
    weight_version: str = ""
    weight_versions: list[VersionSpan] | None = None


class _Answer(msgspec.Struct, Generic[TokenId]):
    text: str
    meta_info: _Meta[TokenId]
    output_ids: msgspec.Raw = msgspec.Raw(b"[]")  # an aborted request may have none


@cache
def _decoder(vocab_size: int) -> msgspec.json.Decoder[_Answer[int]]:
    return msgspec.json.Decoder(_Answer[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]])


_ENCODER = msgspec.json.Encoder()


def decode_answer(status: int, body: bytes, asked: Asked) -> Generation:
    """The generation in an HTTP answer to `asked`. Raises AttemptFailed with the kind of failure."""
    if status != 200:
        raise AttemptFailed(_kind_of_status(status), f"HTTP {status}: {_error_text(body)}")
    try:
        answer = _decoder(asked.vocab_size).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        said = _STAMP.search(body)
        raise AttemptFailed(
            RequestFault.MALFORMED,
            f"{error}; body begins {_error_text(body[:100])!r}",
            Defect.UNREADABLE,
            read_stamp(said[1].decode(errors="replace"))[1] if said is not None else "",
        ) from error
    finish = answer.meta_info.finish_reason
    if finish.type != "abort":
        return _generation(answer, asked)
    kind = RequestFault.ABORTED if finish.status_code is None else _kind_of_status(finish.status_code)
    failure = AttemptFailed(kind, finish.message or "aborted by the engine")
    with suppress(AttemptFailed):  # of no use
        failure.partial = _generation(answer, asked) if kind is RequestFault.ABORTED else None
    raise failure


def _generation(answer: _Answer[int], asked: Asked) -> Generation:
    """The checked generation; AttemptFailed for an answer that cannot be what was sampled."""
    meta, tokens, most = answer.meta_info, answer.meta_info.output_token_logprobs, asked.sampling.max_new_tokens
    engine = read_stamp(meta.weight_version)[1]
    if meta.id != asked.rid:
        raise _malformed(Defect.FOREIGN, f"{meta.id[:_MAX_DETAIL]!r} instead of {asked.rid!r}", engine)
    if not 0 < len(tokens) <= most:
        raise _malformed(
            Defect.LENGTH, f"{counted(len(tokens), 'token')} with log-probs, at most {most} were asked for", engine
        )
    ids = [token.id for token in tokens]
    # Bytes as the engine writes them, in nearly every answer: to compare them costs less than to decode them.
    if bytes(answer.output_ids) != _ENCODER.encode(ids) and _ints(answer.output_ids) != ids:
        raise _malformed(Defect.IDS, f"{counted(len(ids), 'token')} with log-probs", engine)
    output_ids = np.frombuffer(struct.pack(f"<{len(ids)}i", *ids), "<i4")  # three times as fast as numpy on a list
    if (wrong := _wrong_end(meta.finish_reason, output_ids, asked.sampling)) is not None:
        raise _malformed(Defect.END, wrong, engine)
    spans = [VersionSpan(meta.weight_version, 0, len(ids))] if meta.weight_versions is None else meta.weight_versions
    return Generation(
        output_ids,
        _logprobs([token.logprob for token in tokens], engine),
        meta.finish_reason.type,
        _versions(spans, len(ids), engine, asked.owner),
        answer.text,
        engine,
    )


def _ints(raw: msgspec.Raw) -> list[int] | None:
    try:
        return msgspec.json.decode(raw, type=list[int])
    except (msgspec.DecodeError, RecursionError):
        return None


def _wrong_end(finish: _Finish, ids: NDArray[np.int32], sampling: SamplingParams) -> str | None:
    """Why a response cannot have ended so, or None."""
    matched = finish.matched
    if isinstance(matched, int) and finish.type == "stop" and ids[-1] != matched:
        return f"token {matched} is said to have ended it, and the last one is {ids[-1]}"
    if isinstance(matched, str) and finish.type == "stop" and matched not in sampling.stop:
        return f"the engine says {matched[:_MAX_DETAIL]!r}, which is no stop string of the request"
    if not sampling.ignore_eos:
        for stop in sampling.stop_token_ids:
            if (early := ids[:-1] == stop).any():
                return f"token {int(early.argmax()) + 1} of {len(ids)} is the end token {stop}"
    return None


def _logprobs(values: list[float], engine: str) -> NDArray[np.float32]:
    """The log-probs as float32, which are those of tokens that can be drawn. JSON has no NaN and no infinities."""
    try:
        logprobs = np.frombuffer(struct.pack(f"<{len(values)}f", *values), "<f4")
    except (struct.error, OverflowError) as error:
        raise _malformed(Defect.LOGPROBS, str(error), engine) from error
    lowest, highest = float(logprobs.min()), float(logprobs.max())
    if lowest < LOWEST_LOGPROB or highest > HIGHEST_LOGPROB:
        at = int(logprobs.argmin() if lowest < LOWEST_LOGPROB else logprobs.argmax())
        raise _malformed(Defect.LOGPROBS, f"{values[at]:.6g} of token {at + 1} of {len(values)}", engine)
    return logprobs


def _versions(spans: list[VersionSpan], count: int, engine: str, owner: str | None) -> tuple[VersionSpan, ...]:
    """Spans that cover [0, count) without a gap, by the versions in their stamps."""
    made = [span for span in spans if span.end > span.start]
    spans = [VersionSpan(read_stamp(span.version, owner)[0], span.start, span.end) for span in made]
    at = 0
    for span in spans:
        if span.start != at:
            raise _malformed(Defect.VERSIONS, f"token {at} of {count} has none: {_told(spans)}", engine)
        if span.version.startswith(TORN_PREFIX):
            torn = f"tokens {span.start}-{span.end} were made by torn weights {span.version}"
            raise _malformed(Defect.VERSIONS, torn, engine)
        at = span.end
    if at != count:
        raise _malformed(Defect.VERSIONS, f"{at} of {count} tokens have one: {_told(spans)}", engine)
    return tuple(spans)


def _told(spans: list[VersionSpan]) -> str:
    return ", ".join(f"{span.version} [{span.start}, {span.end})" for span in spans)[:_MAX_DETAIL]


def _malformed(defect: Defect, detail: str, engine: str) -> AttemptFailed:
    return AttemptFailed(RequestFault.MALFORMED, detail, defect, engine)


def _kind_of_status(status: int) -> RequestFault:
    if status in (408, 429, 503):
        return RequestFault.BUSY
    return RequestFault.SERVER_ERROR if status >= 500 or status < 400 else RequestFault.REFUSED


def _error_text(body: bytes) -> str:
    """The message inside an error body of one of the usual shapes."""
    try:
        value = msgspec.json.decode(body)
        for key in ("error", "message", "detail"):
            if isinstance(value, dict) and key in value:
                value = value[key]
        return str(value)[:_MAX_DETAIL]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body[: 4 * _MAX_DETAIL].decode(errors="replace")[:_MAX_DETAIL]
