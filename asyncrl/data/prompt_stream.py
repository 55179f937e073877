"""PromptStream: endless prompts, epoch after epoch, with a position that can be saved and restored.

Invariants
- Each epoch draws every prompt exactly once. The order depends on (seed, epoch) alone, on any machine and version.
- Each draw has an `ordinal`, counted over all epochs. No ordinal is used twice, and a resume keeps them.
- A position can be restored only over the same prompts: same order, same tokens, same answers.
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
from asyncrl.errors import DataError, counted


@dataclass(frozen=True, slots=True)
class PromptDraw:
    """One prompt taken from the stream."""

    ordinal: int
    """Number of this draw since the beginning of the stream, from 0."""
    epoch: int
    """Epoch that the draw belongs to, from 0."""
    prompt: Prompt
    executor: str = ""
    """Name of the executor whose stream it is; empty for the executor without a name."""


class PromptStream:
    """Draws from a list of prompts without end."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool,
        max_prompt_tokens: int | None = None,
        executor: str = "",
    ) -> None:
        """Hashes all prompts once, which takes seconds for millions of prompts. Draws bear the name of the `executor`.

        `max_prompt_tokens` is the limit over which prompts were left out of `prompts` (None: no limit). It only makes
        the message of `restore` precise. A stream without prompts is for a run without steps.
        """
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._max_prompt_tokens = max_prompt_tokens
        self._executor = executor
        self._fingerprint = _fingerprint(prompts)
        self._ordinal = 0
        self._order_epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    @classmethod
    def of(cls, prompts: PromptSet, config: DataConfig, executor: str = "") -> PromptStream:
        """Streams `prompts` in the order that `config` asks for, to the executor of that name."""
        longest, order = prompts.max_prompt_tokens, prompts.prompts
        return cls(order, seed=config.seed, shuffle=config.shuffle, max_prompt_tokens=longest, executor=executor)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    @property
    def epoch(self) -> int:
        """Epoch of the next draw."""
        return self._ordinal // max(len(self._prompts), 1)

    def draw(self) -> PromptDraw:
        """Takes the next prompt."""
        drawn = self.at(self._ordinal)
        self._ordinal += 1
        return drawn

    def at(self, ordinal: int) -> PromptDraw:
        """Returns the draw with this number, taken or not yet taken. Does not move the stream.

        Raises DataError when there are no prompts.
        """
        if not self._prompts:
            raise DataError("data.source is not set, so there are no prompts to train on")
        epoch, position = divmod(ordinal, len(self._prompts))
        if epoch != self._order_epoch:
            self._order_epoch, self._order = epoch, _epoch_order(len(self._prompts), self._seed, epoch, self._shuffle)
        return PromptDraw(ordinal, epoch, self._prompts[self._order[position]], self._executor)

    def num_rollouts_per_epoch(self, prompts_per_step: int) -> int:
        """Returns the number of whole batches in one epoch; raises DataError if there is none."""
        whole = len(self._prompts) // prompts_per_step
        if whole == 0:
            raise DataError(
                f"{counted(len(self._prompts), 'prompt')} cannot fill one batch of rollout.prompts_per_step = "
                f"{prompts_per_step}; lower it, add data, or set train.num_steps"
            )
        return whole

    def state(self) -> dict[str, Any]:
        """Returns the position, as plain JSON types, for `restore`."""
        return {
            "ordinal": self._ordinal,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "size": len(self),
            "fingerprint": self._fingerprint,
            "max_prompt_tokens": self._max_prompt_tokens,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves to the position `state`; raises DataError when it belongs to other data or another order."""
        mine = self.state()
        differing = [name for name in ("seed", "shuffle", "size", "fingerprint") if state.get(name) != mine[name]]
        if differing:
            name = differing[0]
            what = f"{name} was {state.get(name)!r}, is {mine[name]!r}"
            if name == "fingerprint":
                what = "prompts, answers or their order have changed, or are rendered or tokenised in another way"
            longest = state.get("max_prompt_tokens", self._max_prompt_tokens)
            if name in ("size", "fingerprint") and longest != self._max_prompt_tokens:
                raise DataError(
                    f"the saved position in the prompt data does not fit: {what}. Prompts over "
                    f"{self._max_prompt_tokens} tokens are left out now, because they leave no room for a response; "
                    f"when the position was saved, the limit was {longest}. Set rollout.max_new_tokens, "
                    "model.context_length and engine.max_total_tokens back to their values of that run"
                )
            raise DataError(
                f"the saved position in the prompt data does not fit: {what}; resume with the data and seed that the "
                "run began with"
            )
        self._ordinal = int(state["ordinal"])


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """Hash of the ids, tokens and answers. An id alone stays the same when a line of the data is edited."""
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
    """int64 [size]: the order of one epoch.

    Sorts random keys, because PCG64's raw stream is the same in all numpy versions and `permutation` is not.
    """
    if not shuffle:
        return np.arange(size, dtype=np.int64)
    keys = np.random.PCG64([seed & (2**63 - 1), epoch]).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int64)
