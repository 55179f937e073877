"""Partial rollouts: what an aborted request had generated is kept, and the next attempt goes on from there. Pure.

The engine samples the rest after prompt and kept tokens, under whatever weights it holds then; it computes their KV
anew, so that each token's log-prob is exact for the weights that its version names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.data.sample import VersionSpan
from asyncrl.rollout.wire import Generation

Detokenize = Callable[[NDArray[np.int32]], str]
"""From ids, int32 [tokens], to text without special tokens."""


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """A response in the making, as `begin` and `extended` make it: what is to be asked next, and what is there."""

    input_ids: msgspec.Raw
    """JSON array of the prompt and what was generated."""
    sampling_params: msgspec.Raw
    """JSON object, for the rest."""
    output_ids: NDArray[np.int32]
    """int32 [tokens]"""
    logprobs: NDArray[np.float32]
    """float32 [tokens]"""
    versions: tuple[VersionSpan, ...]

    @classmethod
    def begin(cls, input_ids: msgspec.Raw, sampling_params: msgspec.Raw) -> PartialRollout:
        """Nothing was generated yet."""
        return cls(input_ids, sampling_params, np.empty(0, np.int32), np.empty(0, np.float32), ())

    def extended(self, piece: Generation) -> PartialRollout:
        """With what one attempt generated before it was aborted; at least one token is left to the next."""
        sampling: dict[str, Any] = msgspec.json.decode(self.sampling_params)
        count = min(len(piece.output_ids), sampling["max_new_tokens"] - 1)
        if count < 1:
            return self
        sampling["max_new_tokens"] -= count
        ids = msgspec.json.encode(piece.output_ids[:count].tolist())
        kept = [VersionSpan(s.version, s.start, min(s.end, count)) for s in piece.versions if s.start < count]
        return PartialRollout(
            msgspec.Raw(bytes(self.input_ids)[:-1] + b"," + ids[1:]),
            msgspec.Raw(msgspec.json.encode(sampling)),
            np.concatenate([self.output_ids, piece.output_ids[:count]]),
            np.concatenate([self.logprobs, piece.logprobs[:count]]),
            self._with_spans(kept),
        )

    def finished(self, rest: Generation, detokenize: Detokenize) -> Generation:
        """The whole response, once an attempt came to its end. Its text is that of all tokens together, as a character
        may be cut in two by an abort; without the token that stopped it, as the engine has it."""
        output_ids = np.concatenate([self.output_ids, rest.output_ids])
        return Generation(
            output_ids=output_ids,
            logprobs=np.concatenate([self.logprobs, rest.logprobs]),
            finish_reason=rest.finish_reason,
            versions=self._with_spans(rest.versions),
            text=detokenize(output_ids[:-1] if rest.finish_reason == "stop" else output_ids),
        )

    def _with_spans(self, more: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
        """The spans so far, and those of the tokens that follow, counted on."""
        spans, offset = list(self.versions), len(self.output_ids)
        for span in more:
            if spans and spans[-1].version == span.version:
                spans[-1] = VersionSpan(span.version, spans[-1].start, offset + span.end)
            else:
                spans.append(VersionSpan(span.version, offset + span.start, offset + span.end))
        return tuple(spans)
