"""Stop strings of several tokens: where a response ends that contains one. Pure.

An engine looks for a stop string in the text of its last few tokens, as many as the string has in the tokenizer's own
spelling. It misses one that was sampled in more, smaller tokens, and one that was begun before an abort and ended after
it. So the client looks too: a response ends with the token that completes the first stop string. That token is the last
one that is trained; what was sampled after it is dropped with its log-probs, which changes none before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from asyncrl.data.sample import VersionSpan
from asyncrl.rollout.requests.wire import Generation

Detokenize = Callable[[NDArray[np.int32]], str]
"""From ids, int32 [tokens], to text without the end token."""


def ended_at_stop(made: Generation, stop: Sequence[str], detokenize: Detokenize) -> Generation | None:
    """`made` up to the token that completes its first stop string, its text up to the string; None without one."""
    text = detokenize(made.output_ids)
    ends = [at + len(string) for string in stop if (at := text.find(string)) >= 0]
    if not ends:
        return None

    def stopped(count: int) -> bool:
        so_far = detokenize(made.output_ids[:count])
        return any(string in so_far for string in stop)

    count = len(made.output_ids)
    if stopped(count - 1):  # nearly never: the engine missed it
        low, count = 0, count - 1  # no stop in `low` tokens, one in `count`
        while count - low > 1:
            middle = (low + count) // 2
            low, count = (low, middle) if stopped(middle) else (middle, count)
    return replace(
        made,
        output_ids=made.output_ids[:count],
        logprobs=made.logprobs[:count],
        finish_reason="stop",
        versions=tuple(
            VersionSpan(span.version, span.start, min(span.end, count)) for span in made.versions if span.start < count
        ),
        text=text[: min(ends)],
    )
