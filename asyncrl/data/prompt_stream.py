"""PromptStream: prompts without end, epoch after epoch, from a place that can be saved and found again.

Invariants
- Each epoch draws every prompt exactly once; its order follows from (seed, epoch) alone, on any machine and version.
- A draw is known by its `ordinal`, counted over all epochs: never used twice, the same after a resume.
- A place is found again only in the same prompts: in their order, as tokens, with their answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.sections.data import DataConfig
from asyncrl.data.datasets import PromptSet
from asyncrl.data.sample import Prompt
from asyncrl.errors import DataError


@dataclass(frozen=True, slots=True)
class PromptDraw:
    """One prompt taken from the stream."""

    ordinal: int
    """Number of this draw since the stream's beginning."""
    epoch: int
    prompt: Prompt


class PromptStream:
    """Draws from `prompts` for ever."""

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, max_prompt_tokens: int | None = None
    ) -> None:
        """Reads all prompts once, which takes seconds where there are millions.

        `prompts` are what is left of the data without those over `max_prompt_tokens`; None: all of it.
        """
        if not prompts:
            raise DataError("a prompt stream needs at least one prompt")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._max_prompt_tokens = max_prompt_tokens
        self._fingerprint = _fingerprint(prompts)
        self._ordinal = 0
        self._order_epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    @classmethod
    def of(cls, prompts: PromptSet, config: DataConfig) -> PromptStream:
        """What was loaded, in the order that `config` asks for."""
        longest = prompts.max_prompt_tokens
        return cls(prompts.prompts, seed=config.seed, shuffle=config.shuffle, max_prompt_tokens=longest)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    @property
    def epoch(self) -> int:
        """Epoch of the next draw."""
        return self._ordinal // len(self._prompts)

    def draw(self) -> PromptDraw:
        drawn = self.at(self._ordinal)
        self._ordinal += 1
        return drawn

    def at(self, ordinal: int) -> PromptDraw:
        """The draw with this number, whether it was drawn or not; moves nothing."""
        epoch, position = divmod(ordinal, len(self._prompts))
        if epoch != self._order_epoch:
            self._order_epoch, self._order = epoch, _epoch_order(len(self._prompts), self._seed, epoch, self._shuffle)
        return PromptDraw(ordinal, epoch, self._prompts[self._order[position]])

    def num_rollouts_per_epoch(self, prompts_per_step: int) -> int:
        """Whole batches in one epoch; DataError when there is not even one."""
        whole = len(self._prompts) // prompts_per_step
        if whole == 0:
            raise DataError(
                f"{len(self._prompts)} prompts do not fill one batch of rollout.prompts_per_step = {prompts_per_step}; "
                "lower it, add data, or set train.num_steps"
            )
        return whole

    def state(self) -> dict[str, Any]:
        """The cursor, as plain JSON types."""
        return {
            "ordinal": self._ordinal,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "size": len(self),
            "fingerprint": self._fingerprint,
            "max_prompt_tokens": self._max_prompt_tokens,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues at `state`; DataError when it belongs to other data or another order."""
        mine = self.state()
        differing = [name for name in ("seed", "shuffle", "size", "fingerprint") if state.get(name) != mine[name]]
        if differing:
            name = differing[0]
            what = f"{name} was {state.get(name)!r}, is {mine[name]!r}"
            if name == "fingerprint":
                what = "prompts, answers or their order were changed, or are rendered or tokenised in another way"
            longest = state.get("max_prompt_tokens", self._max_prompt_tokens)
            if name in ("size", "fingerprint") and longest != self._max_prompt_tokens:
                raise DataError(
                    f"the saved place in the prompt data does not fit: {what}. Prompts over {self._max_prompt_tokens} "
                    f"tokens are left out now, since they leave no room for a response, and those over {longest} when "
                    "it was saved; set rollout.max_new_tokens, model.context_length and engine.max_total_tokens as "
                    "they were"
                )
            raise DataError(
                f"the saved place in the prompt data does not fit: {what}; resume with the data and seed that the run "
                "began with"
            )
        self._ordinal = int(state["ordinal"])


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """Of what is asked and what is expected; an id alone would be the same after a line of the data was mended."""
    digest = blake2b(digest_size=8)
    for prompt in prompts:
        for part in (
            prompt.prompt_id.encode(errors="surrogatepass"),
            prompt.token_ids.tobytes(),
            _bytes(prompt.answer),
        ):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def _bytes(answer: str | None) -> bytes:
    return b"\0" if answer is None else b"\1" + answer.encode(errors="surrogatepass")


def _epoch_order(size: int, seed: int, epoch: int, shuffle: bool) -> NDArray[np.int64]:
    """int64 [size]: sorts random keys, as PCG64's raw stream is fixed across numpy versions (`permutation` is not)."""
    if not shuffle:
        return np.arange(size, dtype=np.int64)
    keys = np.random.PCG64([seed & (2**63 - 1), epoch]).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int64)
