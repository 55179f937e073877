"""Session: one attempt of a program at a prompt. It is the only way from a program to the engines.

Invariants
- Every answer that a program got is recorded with the ids that were sent for it; nothing is tokenised again.
- A session holds a slot only while one of its requests is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.data.sample import Sample
from asyncrl.rollout.generation.sequences import Exchange, sequences_of
from asyncrl.rollout.generation.slots import Slots
from asyncrl.rollout.requests.generate_client import GenerateClient
from asyncrl.rollout.requests.wire import Generation, SamplingParams, encode_prompt


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """What all samples of a group send, encoded once."""

    token_ids: NDArray[np.int32]
    """int32 [tokens] of the prompt."""
    input_ids: msgspec.Raw
    """The same as a JSON array."""
    sampling: SamplingParams
    vocab_size: int

    @classmethod
    def of(cls, token_ids: NDArray[np.int32], sampling: SamplingParams, vocab_size: int) -> EncodedPrompt:
        """Raises ValueError for an id outside the vocabulary, and for no ids."""
        return cls(token_ids, encode_prompt(token_ids, vocab_size), sampling, vocab_size)


class Session:
    """One sample in the making. It is opened with a slot, which its first request uses."""

    __slots__ = ("_client", "_exchanges", "_has_slot", "_prompt", "_requests", "_slots", "sample_id")

    def __init__(self, sample_id: str, prompt: EncodedPrompt, client: GenerateClient, slots: Slots) -> None:
        """A slot was taken for it."""
        self.sample_id = sample_id
        self._prompt = prompt
        self._client = client
        self._slots = slots
        self._has_slot = True
        self._requests = 0
        self._exchanges: list[Exchange] = []

    async def generate(self, token_ids: NDArray[np.int32]) -> Generation:
        """Has the policy continue `token_ids`, int32 [tokens]: the whole history, as ids.

        Raises GenerationFailed when no engine answers, ValueError for an id outside the vocabulary.
        """
        prompt, turn = self._prompt, self._requests
        input_ids = prompt.input_ids if token_ids is prompt.token_ids else encode_prompt(token_ids, prompt.vocab_size)
        self._requests += 1
        if self._has_slot:
            self._has_slot = False
        else:
            await self._slots.acquire(self.sample_id)
        try:
            generation = await self._client.generate(self.sample_id, input_ids, prompt.sampling, turn=turn)
        finally:
            self._slots.give_back()
        self._exchanges.append(Exchange(token_ids, generation))
        return generation

    def close(self) -> None:
        """The program has ended; a slot that it never used is given back."""
        if self._has_slot:
            self._has_slot = False
            self._slots.give_back()

    def sample(self, group_id: str) -> Sample:
        """What was recorded, without a reward; a failed sample where the program made no request."""
        if not self._exchanges:
            return failed_sample(self.sample_id, group_id, "generation: the program made no request")
        last = self._exchanges[-1].generation
        return Sample(self.sample_id, group_id, sequences_of(self._exchanges), last.finish_reason, last.text)


def failed_sample(sample_id: str, group_id: str, failure: str) -> Sample:
    """A sample that could not be generated."""
    return Sample(sample_id, group_id, (), "abort", "", failure=failure)
