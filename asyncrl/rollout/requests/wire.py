"""Requests to the engine's /generate as bytes, and the response that comes of one. No I/O.

Token ids are sent as they are; nothing is tokenised again. `answers.py` reads what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.data.sample import FinishReason, VersionSpan


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a response is sampled."""

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    """Strings of several tokens that end a response."""

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
        if self.stop:
            params |= {"stop": self.stop, "no_stop_trim": True}
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
    engine: str = ""
    """Id of the engine that made the last token, where its stamp names it."""


class _Request(msgspec.Struct):
    rid: str
    input_ids: msgspec.Raw
    sampling_params: msgspec.Raw
    return_logprob: bool = True
    stream: bool = False
    extra_key: str | msgspec.UnsetType = msgspec.UNSET


_ENCODER = msgspec.json.Encoder()


def encode_prompt(token_ids: NDArray[np.int32], vocab_size: int) -> msgspec.Raw:
    """The JSON array `input_ids`; ValueError for an id outside the engine's embedding, which would kill the engine."""
    if len(token_ids) == 0 or int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
        raise ValueError(f"token ids must be in [0, {vocab_size}) and at least one")
    return msgspec.Raw(_ENCODER.encode(token_ids.tolist()))


def encode_request(rid: str, input_ids: msgspec.Raw, sampling: SamplingParams, extra_key: str | None = None) -> bytes:
    """The body of a request. Only requests with the same `extra_key` share KV in the engine's prefix cache."""
    return _ENCODER.encode(
        _Request(rid, input_ids, sampling.encode(), extra_key=msgspec.UNSET if extra_key is None else extra_key)
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
