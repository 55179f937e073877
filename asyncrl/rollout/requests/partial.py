"""Partial rollouts: the tokens of an aborted request are kept, and the next attempt goes on after them. Pure.

The engine samples the rest after the prompt and the kept tokens, under the weights that it holds then. It computes
their KV anew, so the log-prob of each token is exact for the weights that its version names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.data.sample import FinishReason, VersionSpan
from asyncrl.rollout.requests.stops import Detokenize
from asyncrl.rollout.requests.wire import Generation, SamplingParams


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """A response in the making: what the next attempt sends, and what is there."""

    input_ids: msgspec.Raw
    """JSON array of the prompt and what was generated."""
    sampling: SamplingParams
    """For the rest."""
    output_ids: NDArray[np.int32]
    """int32 [tokens]"""
    logprobs: NDArray[np.float32]
    """float32 [tokens]"""
    versions: tuple[VersionSpan, ...]

    @classmethod
    def begin(cls, input_ids: msgspec.Raw, sampling: SamplingParams) -> PartialRollout:
        """Nothing was generated yet."""
        return cls(input_ids, sampling, np.empty(0, np.int32), np.empty(0, np.float32), ())

    def extended(self, piece: Generation) -> PartialRollout:
        """The response after one more attempt generated `piece`."""
        ids = msgspec.json.encode(piece.output_ids.tolist())
        return PartialRollout(
            msgspec.Raw(bytes(self.input_ids)[:-1] + b"," + ids[1:]),
            replace(self.sampling, max_new_tokens=self.sampling.max_new_tokens - len(piece.output_ids)),
            np.concatenate([self.output_ids, piece.output_ids]),
            np.concatenate([self.logprobs, piece.logprobs]),
            self._with_spans(piece.versions),
        )

    @property
    def end(self) -> FinishReason | None:
        """How the response ended, where the abort came with its last token; None while there is more to generate."""
        sampling = self.sampling
        if len(self.output_ids) and not sampling.ignore_eos and int(self.output_ids[-1]) in sampling.stop_token_ids:
            return "stop"
        return None if sampling.max_new_tokens > 0 else "length"

    def whole(self, finish_reason: FinishReason, detokenize: Detokenize) -> Generation:
        """The whole response, which has ended.

        Its text is decoded from all tokens together, because an abort may cut a character in two; like the engine's,
        it leaves out the token that stopped the response.
        """
        sampling = self.sampling
        by_token = not sampling.stop or int(self.output_ids[-1]) in sampling.stop_token_ids
        ids = self.output_ids[:-1] if finish_reason == "stop" and by_token else self.output_ids
        return Generation(self.output_ids, self.logprobs, finish_reason, self.versions, detokenize(ids))

    def _with_spans(self, more: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
        """The spans so far, and `more` counted on after them."""
        spans, offset = list(self.versions), len(self.output_ids)
        for span in more:
            if spans and spans[-1].version == span.version:
                spans[-1] = VersionSpan(span.version, spans[-1].start, offset + span.end)
            else:
                spans.append(VersionSpan(span.version, offset + span.start, offset + span.end))
        return tuple(spans)
