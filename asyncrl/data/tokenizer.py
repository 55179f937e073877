"""The policy's tokenizer: text to ids and back, and the ids that end a response.

Invariants
- No id outside the model's vocabulary leaves this module. `vocab_size` comes from the model's config.json and may
  differ from the tokenizer's; an engine that gets a larger id dies.
- `stop_token_ids` is the one set of ids that end a response: all end tokens that the tokenizer,
  generation_config.json and config.json name. Each request carries it, so engine and trainer always agree.
- Only local files are read; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import ConfigError, DataError, ModelError

Messages = list[dict[str, Any]]
"""A conversation: objects with `role` and `content`."""

_TOKENIZER_FILES = ("tokenizer.*", "vocab.*", "*.model", "*.tiktoken")


class PolicyTokenizer:
    """The part of a Hugging Face tokenizer that this project uses. Not safe for use from two threads at once."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        source: Path,
        vocab_size: int,
        context_length: int,
        eos_token_id: int | None,
        stop_token_ids: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self.source = source
        """Model directory."""
        self.vocab_size = vocab_size
        """Rows of the model's embedding: ids are in [0, vocab_size)."""
        self.context_length = context_length
        """Longest prompt + response, in tokens, that the model supports."""
        self.eos_token_id = eos_token_id
        """The end token that closes supervised responses; None if the model has none."""
        self.stop_token_ids = tuple(stop_token_ids)
        """All ids that end a response, ascending."""

    @classmethod
    def load(cls, path: Path) -> PolicyTokenizer:
        """Loads from a Hugging Face directory. Importing transformers takes seconds, so call it in a thread.

        Raises ModelError when the directory, config.json or the tokenizer is missing or unreadable.
        """
        if not path.is_dir():
            raise ModelError(f"model.path: {path} is not a directory; point it at a local Hugging Face model directory")
        config = _read_json(path / "config.json")
        if config is None:
            raise ModelError(f"model.path: {path} holds no config.json; it is not a Hugging Face model directory")
        vocab_size = config.get("vocab_size")
        context_length = config.get("max_position_embeddings")
        if not isinstance(vocab_size, int) or not isinstance(context_length, int):
            raise ModelError(f"model.path: {path}/config.json lacks vocab_size or max_position_embeddings")

        if not any(next(path.glob(pattern), None) for pattern in _TOKENIZER_FILES):
            # transformers would make an empty tokenizer without an error
            raise ModelError(
                f"model.path: {path} holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json, ...)"
            )

        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:  # transformers raises OSError, ValueError, ImportError or KeyError here
            first_line = str(error).strip().partition("\n")[0]
            raise ModelError(f"model.path: no tokenizer could be loaded from {path}: {first_line}") from error
        generation = _read_json(path / "generation_config.json") or {}
        ends = [
            *_as_ids(tokenizer.eos_token_id),
            *_as_ids(generation.get("eos_token_id")),
            *_as_ids(config.get("eos_token_id")),
        ]
        ends = [token for token in ends if 0 <= token < vocab_size]
        return cls(
            tokenizer,
            source=path,
            vocab_size=vocab_size,
            context_length=context_length,
            eos_token_id=ends[0] if ends else None,
            stop_token_ids=sorted(set(ends)),
        )

    def uses_chat_template(self, setting: bool | Literal["auto"]) -> bool:
        """Resolves `data.chat_template`; raises ConfigError for True without a template."""
        has_template = bool(getattr(self._tokenizer, "chat_template", None))
        if setting is True and not has_template:
            raise ConfigError(f"data.chat_template is true, but the tokenizer in {self.source} has no chat template")
        return has_template if setting == "auto" else setting

    def render_chat(self, messages: Messages) -> str:
        """Renders a conversation as text that ends with the header of the assistant's turn."""
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[NDArray[np.int32]]:
        """Returns the ids of each text, int32 [tokens].

        `add_special_tokens` adds the tokens that the tokenizer puts before plain text (BOS); rendered chats have them
        already. Raises DataError for an id that the model's embedding does not hold.
        """
        if not texts:
            return []
        rows = self._tokenizer(list(texts), add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        encoded = [np.asarray(row, dtype=np.int32) for row in rows]
        for text, ids in zip(texts, encoded, strict=True):
            if len(ids) and int(ids.max()) >= self.vocab_size:
                raise DataError(
                    f"the tokenizer in {self.source} gives id {int(ids.max())} for {text[:60]!r}, but the model's "
                    f"vocab_size is {self.vocab_size}: tokenizer and model do not belong together"
                )
        return encoded

    def decode(self, ids: NDArray[np.int32]) -> str:
        """Returns the text of `ids`, int32 [tokens], without special tokens, as the engine decodes a response."""
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        return text

    def stop_ids(self, strings: Sequence[str]) -> tuple[int, ...]:
        """Returns the id of each stop string; raises ConfigError for a string that is not exactly one token."""
        ids: list[int] = []
        vocabulary: dict[str, int] = self._tokenizer.get_vocab() if strings else {}
        for string in strings:
            tokens = (
                [vocabulary[string]]
                if string in vocabulary
                else self.encode([string], add_special_tokens=False)[0].tolist()
            )
            if len(tokens) != 1 or tokens[0] >= self.vocab_size:
                raise ConfigError(
                    f"rollout.stop: {string!r} is {len(tokens)} tokens {tokens} to this tokenizer; "
                    "each stop string must be one token of the model's vocabulary"
                )
            ids.append(tokens[0])
        return tuple(ids)


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else [int(v) for v in value]


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ModelError(f"model.path: {path} is not valid JSON ({error})") from error
